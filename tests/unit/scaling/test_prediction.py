"""Is the model what was measured, where it was measured, and are its answers shown in full?"""

import math
from dataclasses import replace

import pytest

from ddpnb.history.store import Store
from ddpnb.protocol.devices import parse_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LINKS, parse_link
from ddpnb.reports.inside.prediction import PredictionResult
from ddpnb.scaling.calibrate import calibrate, seconds_of
from ddpnb.scaling.model import (
    FORMULAS,
    Cost,
    Machine,
    Workload,
    link_ceiling,
    point,
    step_seconds,
    stops_at,
)
from ddpnb.scaling.predict import Question, parse_numbers, predict, samples_at
from ddpnb.session.scaling import measured_in, predicted
from tests.rank.test_laboratory import EXCHANGE, LATENCY, TRANSFER, S
from tests.unit.history.fake_runs import fake_comparison
from tests.unit.scaling.machines import CROWDED, FIXED, PER_SAMPLE, measured

SLOW = parse_link("1Mbit,3ms")
INSTANT = Workload(alone=Cost(0, 0), together=Cost(0, 0), batch_size=64, num_bytes=float(S))


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [(name, num) for name, num in EXCHANGE if name in FORMULAS],
)
def test_exchanges_take_as_long_as_on_emulated_devices(strategy, num_ranks):
    """The same numbers as those that tests of real runs demand."""
    found = step_seconds(strategy, INSTANT, Machine(link=SLOW), num_ranks)
    assert found == pytest.approx(EXCHANGE[strategy, num_ranks], abs=8 * LATENCY)


def test_a_server_is_shared_by_its_workers():
    machine = Machine(link=SLOW)
    cost = Cost(10 * TRANSFER, 0)
    work = replace(INSTANT, alone=cost, together=cost, is_weak=True)
    few, many = (point("async", work, machine, num) for num in (4, 32))
    assert few.efficiency > 0.4
    # rank 0 has no link, the others together one gradient for each transfer
    updates = many.samples_per_second / work.samples(32)
    assert updates == pytest.approx(1 / TRANSFER + 1 / (10 * TRANSFER))


def test_what_was_measured_is_found_again():
    found = calibrate(measured())
    assert found.work.alone.fixed == pytest.approx(FIXED, rel=0.02)
    assert found.work.alone.per_sample == pytest.approx(PER_SAMPLE, rel=0.02)
    assert found.work.together.per_sample == pytest.approx(CROWDED * PER_SAMPLE, rel=0.02)
    for name in ("single", "no-comm", "ddp"):
        step = step_seconds(name, found.work, found.here, 1 if name == "single" else 2)
        assert step == pytest.approx(seconds_of(found.measured, name), rel=0.01)


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_emulated_devices_are_computed_and_not_fitted(jitter):
    devices = parse_devices("16xV100/2", model="resnet50")
    stored = measured(devices=devices, jitter=jitter, rates={"single": 1.0, "ddp": 1.0})
    found = calibrate(stored)
    seconds = 100 * (9.3e-3 + 2.74e-3 * 256) + 25 * (9.3e-3 + 2.74e-3 * 100)  # all batches
    expected = (1 + jitter / 2) * seconds * 256 / (100 * 256 + 25 * 100)
    assert step_seconds("ddp", found.work, found.here, 1) == pytest.approx(expected)
    assert found.here.link_of(8) == LINKS["NVLink-V100"]
    assert found.here.link_of(16) == LINKS["100GbE"]
    prediction = predict(found, Question(ranks=(1, 8, 16)))
    assert prediction.assumptions[0] == f"Computed as in race: {devices.text}."
    assert [each.samples_per_second for each in prediction.measured] == [1.0, 1.0]
    slower = predict(found, Question(ranks=(1, 8, 16), link="1GbE")).points["ddp"]
    assert slower[0] == prediction.points["ddp"][0]
    assert slower[1].step_seconds > 2 * prediction.points["ddp"][1].step_seconds


def test_ranks_that_share_cores_are_slower_and_others_are_not():
    found = calibrate(measured(rates={**measured().rates, "ddp": 24_000.0}))
    here = predict(found, Question(ranks=(2, 4, 8)))
    own = predict(found, Question(ranks=(2, 4, 8), link="100GbE"))
    assert here.stops["ddp"] == 2
    assert here.points["ddp"][2].samples_per_second < here.points["ddp"][0].samples_per_second
    assert own.points["ddp"][2].samples_per_second > 1.5 * own.points["ddp"][0].samples_per_second
    cores = predict(found, Question(ranks=(2, 4, 8), link="100GbE", cores=2))
    assert cores.points["ddp"][2].efficiency < 0.5 * own.points["ddp"][2].efficiency


def test_no_strategy_beats_its_bounds():
    found = calibrate(measured(variation=0.05))
    question = Question(
        ranks=(1, 2, 8, 64, 1024),
        strategies=tuple(FORMULAS),
        link="100GbE",
        batch_per_worker=32,
    )
    prediction = predict(found, question)
    ideal = dict(prediction.ideal)
    for name, points in prediction.points.items():
        for each in points:
            assert each.samples_per_second <= ideal[each.num_ranks] * (1 + 1e-9), name
    machine = Machine(link=parse_link("1Gbit,1ms"))
    work = replace(found.work, batch_size=32, is_weak=True)
    for num in (2, 8, 64):
        rate = point("ddp", work, machine, num).samples_per_second
        assert rate <= link_ceiling(work, machine, num)
    amdahl = dict(predict(found, Question(ranks=(64,), link="100GbE")).amdahl)
    assert amdahl[64] < 256 / FIXED


def test_stragglers_cost_more_the_more_ranks_there_are():
    work = replace(INSTANT, alone=Cost(0.1, 0), together=Cost(0.1, 0), variation=0.1)
    machine = Machine(link=parse_link("100Gbit,0us"))
    steps = [step_seconds("ddp", work, machine, num) for num in (2, 16, 128)]
    assert steps[0] < steps[1] < steps[2]
    rounds = step_seconds("local-sgd", work, machine, 16)
    assert 0.1 < rounds < steps[1]  # over several steps it evens out
    assert stops_at("ddp", work, machine, 16) is not None  # all of it is fixed


def test_a_larger_batch_needs_more_samples():
    assert samples_at(1000, 1e6, 1000) == 2e6
    found = calibrate(measured())
    question = Question(ranks=(1, 4, 64), link="100GbE", batch_per_worker=64)
    question = replace(question, samples=1e6, critical_batch=512)
    times = predict(found, question).seconds_to_target["ddp"]
    assert times[1] < times[0]
    speed_up = predict(found, question).points["ddp"][2].samples_per_second
    assert times[2] == pytest.approx(1e6 * (1 + 64 * 64 / 512) / speed_up)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": (0,)}, "--ranks 0: give numbers of ranks from 1 to 1,000,000."),
        ({"ranks": ()}, "--ranks names no number of ranks: write them as 1,2,4,8."),
        ({"link": "1Gbit"}, "--link 1Gbit has no latency: write both, as in 1Gbit,0.5ms."),
        ({"link": "100GBE"}, "There is no link '100GBE': write rate and latency"),
        ({"strategies": ("dpp",)}, "There is no strategy 'dpp'; did you mean dp or ddp?"),
        ({"strategies": ("hogwild",)}, "hogwild trains in memory that its ranks share"),
        ({"strategies": ("async-shards=0",)}, "Write async-shards=4, with the number of shards"),
        ({"ranks_per_host": 8}, "--hosts goes with --link, which says what lies between hosts."),
        ({"samples": 10.0}, "Time to a target needs both --samples"),
        ({"algorithm": "rings"}, "There is no algorithm 'rings'; choose one of: ring, tree,"),
    ],
)
def test_a_question_that_makes_no_sense_gets_one_sentence(changes, sentence):
    with pytest.raises(UserError) as caught:
        Question(**({"ranks": (1, 2)} | changes))
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).count("\n") == 0


def test_numbers_of_ranks():
    assert parse_numbers("1, 2,64") == (1, 2, 64)
    with pytest.raises(UserError, match="Write --ranks as 1,2,4,8, not two"):
        parse_numbers("two")


def test_what_cannot_be_answered_gets_one_sentence(tmp_path):
    without = {name: rate for name, rate in measured().rates.items() if name != "ddp"}
    with pytest.raises(UserError, match="race has no ddp on two ranks or more, so that"):
        predict(calibrate(measured(rates=without)), Question(ranks=(4,)))
    assert predict(calibrate(measured(rates=without)), Question(ranks=(4,), link="10GbE"))
    with pytest.raises(UserError, match="race has no ddp on two ranks or more"):
        predict(calibrate(measured(num_ranks=1)), Question(ranks=(4,)))
    with pytest.raises(UserError, match="A batch of 256 has no sample for each of 512 ranks"):
        predict(calibrate(measured()), Question(ranks=(512,), link="10GbE"))
    with pytest.raises(UserError, match="No stored comparison has single and no-comm"):
        predicted(Store(tmp_path), Question(ranks=(2,)))
    with pytest.raises(UserError, match="has no no-comm that has finished"):
        measured_in(fake_comparison())


def test_all_is_shown_and_can_be_saved(tmp_path):
    found = calibrate(measured(variation=0.04))
    question = Question(
        ranks=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        strategies=("ddp", "async", "async-shards=4", "local-sgd"),
        link="100GbE",
        ranks_per_host=8,
    )
    result = PredictionResult(predict(found, question))
    bundle = result._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "<table" in bundle["text/html"]
    text = bundle["text/plain"]
    assert "Predicted, not measured: ddp stops scaling at about" in text
    assert "1 of the numbers of ranks are left out here" in text
    for assumption in result.prediction.assumptions:
        assert assumption in text
    words = " ".join(each.get_text() for each in result.plot().figure.texts)
    for part in ("Fitted to race", "strong scaling", "pcie4", "No congestion"):
        assert part in words
    for ending, start in ((".png", b"\x89PNG"), (".html", b"<!doctype"), (".svg", b"<?xml")):
        assert result.save(tmp_path / f"it{ending}").read_bytes().startswith(start)
    assert "held up by" in result.save(tmp_path / "it.txt").read_text()
    with pytest.raises(UserError, match="a prediction is saved as"):
        result.save(tmp_path / "it.pdf")


def test_a_single_size_of_steps_is_said():
    one = measured()
    one = replace(one, alone=one.alone[:1], together=one.together[:1])
    prediction = predict(calibrate(one), Question(ranks=(2,), link="10GbE"))
    assert any("All steps had one size" in each for each in prediction.assumptions)


def test_numbers_are_finite_even_where_exchanges_cost_nothing():
    found = calibrate(measured(rates={**measured().rates, "ddp": 99_000.0}))
    prediction = predict(found, Question(ranks=(1, 2, 3, 4)))
    assert all(math.isfinite(each.step_seconds) for each in prediction.points["ddp"])


def test_the_link_between_gpus_is_found_behind_the_backward_pass():
    link = parse_link("20Gbit,10us")
    work = replace(calibrate(measured()).work, num_bytes=2e8, overlaps=True)
    step = step_seconds("ddp", work, Machine(link=link), 2)
    rates = {**measured().rates, "ddp": 256 / step}
    found = calibrate(measured(device="cuda", rates=rates, num_bytes=2e8), latency=10e-6)
    assert found.here.link.bits_per_second == pytest.approx(20e9, rel=0.1)
    assert step_seconds("ddp", found.work, found.here, 2) == pytest.approx(step, rel=0.01)
