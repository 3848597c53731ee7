"""The model reproduces the measurements it was fitted to, and its predictions are shown."""

import math
import platform
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ddpnb.prediction.calibrate import calibrate
from ddpnb.prediction.model import FORMULAS, Machine, Workload, cost, step_seconds, stops_at
from ddpnb.prediction.predict import Question, answer
from ddpnb.prediction.waiting import expected_max, on_cores
from ddpnb.protocol.devices import Compute, parse_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LINKS, parse_link
from ddpnb.reports.inspection.prediction import PredictionResult
from ddpnb.results.run import Status
from ddpnb.results.store import Store
from ddpnb.session.prediction import measured_in, predicted
from tests.rank.test_emulation import EXCHANGE, LATENCY, S
from tests.unit.prediction.machines import CROWDED, FIXED, PER_SAMPLE, measured
from tests.unit.results.fake_runs import batch, fake_comparison, step

PAGE = Path(__file__).parents[3] / "docs" / "prediction-error.md"
SLOW = parse_link("1Mbit,3ms")
INSTANT = Workload(alone=Compute(0, 0), together=Compute(0, 0), batch_size=64, num_bytes=float(S))
FOUND = calibrate(measured())


def published(strategies: str, step: str, num_parameters: float, **options) -> list[float]:
    """Return the efficiency of strategies on 16 devices, given the step on one device."""
    names = tuple(strategies.split())
    question = Question(ranks=(16,), strategies=names, **{"link": "100GbE", "step": step} | options)
    found = answer(calibrate(measured(num_bytes=4 * num_parameters)), question).points
    return [found[name][0].efficiency for name in names]


@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [(name, num) for name, num in EXCHANGE if name in FORMULAS]
)
def test_exchanges_take_as_long_as_on_emulated_devices(strategy, num_ranks):
    """The tests with real ranks expect the same numbers."""
    compute = Compute(0.001, 0.002)
    work = replace(INSTANT, alone=compute, together=compute, batch_size=24)
    found = step_seconds(strategy, work, Machine(link=SLOW), num_ranks)
    without = step_seconds("no-comm", work, Machine(link=SLOW), num_ranks)
    assert found - without == pytest.approx(EXCHANGE[strategy, num_ranks], abs=8 * LATENCY)


def test_the_page_has_the_formulas_that_are_computed():
    rows = (line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    formulas = {
        row[0]: row[1].removesuffix(" |") for row in rows if row[1].startswith(("t +", "u"))
    }
    ddp = step_seconds("ddp-by-hand", INSTANT, Machine(link=SLOW), 8)
    names = {"N": 8, "L": 3, "a": 3e-3, "b": 8e-6, "S": S, "t": 0, "u": 0, "w": 0, "every": 8}
    for names_of, formula in formulas.items():
        text = re.sub(r"(?<=[\dNSL)]) (?=[(a-zLNS])", "*", formula.replace("AR(S)", f"{ddp}"))
        for strategy in re.findall("[a-z-]{3,}", names_of):
            computed = step_seconds(strategy, INSTANT, Machine(link=SLOW), 8)
            assert computed == pytest.approx(eval(text, {"sqrt": math.sqrt}, names)), strategy
    assert len(formulas) == 6


def test_what_was_measured_is_found_again():
    assert FOUND.work.alone == pytest.approx((PER_SAMPLE, FIXED), rel=0.02)
    assert FOUND.work.together.per_sample == pytest.approx(CROWDED * PER_SAMPLE, rel=0.02)
    for name in ("single", "no-comm", "ddp"):
        step = step_seconds(name, FOUND.work, FOUND.here, 1 if name == "single" else 2)
        assert step == pytest.approx(FOUND.measured.seconds_of(name), rel=0.01)


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_emulated_devices_are_computed_and_not_fitted(jitter):
    devices = parse_devices("16xV100/2", model="resnet50")
    found = calibrate(measured(devices=devices, jitter=jitter, rates={"single": 1.0, "ddp": 1.0}))
    seconds = 100 * (9.3e-3 + 2.74e-3 * 256) + 25 * (9.3e-3 + 2.74e-3 * 100)  # all batches
    expected = (1 + jitter / 2) * seconds * 256 / (100 * 256 + 25 * 100)
    assert step_seconds("ddp", found.work, found.here, 1) == pytest.approx(expected)
    assert found.here.link_of(8) == LINKS["NVLink-V100"]
    assert found.here.link_of(16) == LINKS["InfiniBand-EDR"]
    prediction = answer(found, Question(ranks=(1, 8, 16)))
    assert prediction.measured == {"single": 1.0, "ddp": 1.0}
    slower = answer(found, Question(ranks=(1, 8, 16), link="1GbE")).points["ddp"]
    assert slower[0] == prediction.points["ddp"][0]
    assert slower[1].step_seconds > 2 * prediction.points["ddp"][1].step_seconds


def test_a_given_step_is_that_of_any_machine():
    """With ``--step``, only the bytes of the gradients are taken from the comparison."""
    question = Question(ranks=(1, 16), link="10GbE", step="178ms/64", strategies=("ddp", "async"))
    others = measured(variation=0.4, optimizer_seconds=0.1, backward_share=0.1, num_passes=4)
    one, other = (answer(found, question) for found in (FOUND, calibrate(others)))
    assert one.points == other.points
    assert one.points["ddp"][0].step_seconds == pytest.approx(0.178)
    assert one.measured == {}
    half = answer(FOUND, replace(question, batch_per_worker=32)).points["ddp"][0]
    assert half.step_seconds == pytest.approx(0.089)


def test_only_the_last_micro_batch_hides_exchanges():
    gpt2 = {"num_parameters": 124e6, "step": "450ms/60", "link": "10Gbit,20us"}
    once, (five,) = published("ddp", **gpt2), published("ddp", **gpt2, accumulate=5)
    assert five < once[0]
    assert five == pytest.approx(0.39, abs=0.02)
    fitted = calibrate(measured(num_passes=5))
    slow = Question(ranks=(4,), link="1GbE", strategies=("ddp",))
    steps = [answer(each, slow).points["ddp"][0].step_seconds for each in (FOUND, fitted)]
    assert steps[0] < steps[1]


def test_sharded_strategies_send_what_they_send():
    """``zero`` sends GPT-2's parameters in one exposed all-gather. DDP hides nearly all bytes."""
    link = {"link": "InfiniBand-EDR", "num_parameters": 124e6, "step": "300ms/64"}
    ddp, zero, fsdp = published("ddp zero fsdp", **link)
    assert zero == pytest.approx(0.85, abs=0.03)
    assert zero < fsdp <= ddp


def test_one_device_stays_one_device():
    question = Question(ranks=(1, 4), strategies=("single",), link="100GbE")
    one, four = answer(FOUND, question).points["single"]
    assert four.samples_per_second == one.samples_per_second
    assert four.efficiency == 0.25
    rates = {**measured().rates, "single:threads=all": 20_000.0}
    assert list(answer(calibrate(measured(rates=rates)), Question(ranks=(2,))).points) == ["ddp"]


def test_the_best_all_reduce_is_a_ring_for_many_bytes_and_trees_for_few():
    machine = Machine(link=LINKS["InfiniBand-EDR"])
    for num_bytes, is_ring in ((1e9, True), (1e3, False)):
        work = replace(INSTANT, num_bytes=num_bytes)
        ring, best = (
            step_seconds("ddp-by-hand", work, replace(machine, algorithm=name), 8)
            for name in ("ring", "best")
        )
        assert (best == ring, best <= ring) == (is_ring, True)


def test_what_ranks_lose_to_each_other_grows_with_the_cores_they_use():
    found = calibrate(measured(cores=16))
    costs = [cost(found.work, found.here, num).per_sample / PER_SAMPLE for num in (1, 2, 9, 16, 64)]
    assert costs == pytest.approx([1, 1.1, 1.8, 2.5, 2.5], rel=0.02)
    (text, *_) = PredictionResult(answer(found, Question(ranks=(2, 16)))).table().notes
    assert "2 ranks slow each other down by 10 %" in text


def test_stragglers_cost_more_the_more_ranks_there_are():
    work = replace(INSTANT, alone=Compute(0, 0.1), together=Compute(0, 0.1), variation=0.1)
    machine = Machine(link=parse_link("100Gbit,0us"))
    steps = [step_seconds("ddp", work, machine, num) for num in (2, 16, 128)]
    assert steps[0] < steps[1] < steps[2]
    rounds = step_seconds("local-sgd", work, machine, 16)
    assert 0.1 < rounds < steps[1]  # variation evens out over steps
    assert stops_at("ddp", work, machine, 16) is not None  # all computing time is fixed


RATES = {name: rate for name, rate in measured().rates.items() if name != "ddp"}
HOSTS = {"link": "10GbE", "ranks_per_host": 8}


@pytest.mark.parametrize(
    ("found", "question", "sentence"),
    [
        ({}, {"strategies": ("hogwild",)}, "hogwild cannot be predicted"),
        ({}, {"strategies": ("single:threads=all",)}, "single:threads=all cannot be predicted"),
        ({}, {"step": "178ms/64"}, "--step needs --link, the network between the hosts."),
        ({}, {"link": "1GbE", "step": "178ms"}, "--step 178ms is not valid. Write the time and"),
        ({}, {"ranks": (512,), "link": "10GbE"}, "A batch of 256 has too few samples for 512"),
        ({}, {**HOSTS, "strategies": ("dp",)}, "dp is one process and cannot use several hosts"),
        ({"rates": RATES}, {}, "race has no run of ddp on two or more ranks, so the cost"),
    ],
)
def test_what_cannot_be_answered_gets_one_sentence(found, question, sentence):
    with pytest.raises(UserError) as caught:
        answer(calibrate(measured(**found)), Question(**({"ranks": (1, 16)} | question)))
    assert str(caught.value).startswith(sentence)


def test_what_is_lacking_is_named(tmp_path):
    assert answer(calibrate(measured(rates=RATES)), Question(ranks=(4,), link="10GbE"))
    with pytest.raises(UserError, match="No stored comparison has both single and no-comm"):
        predicted(Store(tmp_path), Question(ranks=(2,)))
    with pytest.raises(UserError, match="has no finished run of no-comm"):
        measured_in(fake_comparison())


@pytest.mark.parametrize("seed", range(4))
def test_comparisons_of_this_machine_come_first_and_others_are_named(tmp_path, seed):
    store, draw = Store(tmp_path), random.Random(seed)
    hosts = [platform.node()] * seed + ["lab-7"] * draw.randint(1, 3)
    draw.shuffle(hosts)
    for number, host in enumerate(hosts):
        fake = fake_comparison(("single", "no-comm"))
        given = replace(fake, comparison_id=f"id-{number}", environment={"host": host})
        name = store.begin_comparison(given, wanted_name=f"c{number}").name
        for run in fake.runs:
            run_id = f"{number}-{run.name}"
            store.begin_run(given.comparison_id, replace(run, run_id=run_id, comparison=name))
            steps = [step(each, 0.1 * each) for each in range(1, 9)]
            store.append(batch(run_id, steps, header=run.header))
            store.finish(run_id, Status.FINISHED)
    found = predicted(store, Question(ranks=(2, 4), link="10GbE")).prediction.found.measured
    latest = max(at for at, host in enumerate(hosts) if host == platform.node() or not seed)
    assert found.name == f"c{latest}"
    assert found.place == ("this machine" if seed else "host lab-7")
    text = repr(PredictionResult(answer(calibrate(found), Question(ranks=(2,), link="1GbE"))))
    assert f"as fast as one rank of {found.place}" in text


def test_all_is_shown_once():
    ranks, strategies = (1, 2, 4, 8, 16, 32, 64, 128, 256), ("ddp", "async", "local-sgd")
    question = Question(ranks=ranks, strategies=strategies, **HOSTS)
    result = PredictionResult(answer(calibrate(measured(variation=0.04)), question))
    assert "<table" in result._repr_mimebundle_()["text/html"]
    assert len(result.table().notes) == 4
    (axes,) = result.plot().figure.axes
    names = [text.get_text().partition(":")[0] for text in axes.texts]
    assert sorted(names) == ["async", "ddp", "ideal", "local-sgd"]
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert min(b - a for a, b in pairwise(heights)) > 0.05


def test_numbers_are_finite_even_where_exchanges_cost_nothing():
    one = measured(rates={**measured().rates, "ddp": 99_000.0})
    one = replace(one, alone=one.alone[:1], together=one.together[:1])  # only one size
    prediction = answer(calibrate(one), Question(ranks=(1, 2, 3, 4)))
    assert all(math.isfinite(each.step_seconds) for each in prediction.points["ddp"])


def test_the_link_between_gpus_is_found_behind_the_backward_pass():
    link = parse_link("20Gbit,30us")
    work = replace(FOUND.work, num_bytes=2e8, overlaps=True)
    step = step_seconds("ddp", work, Machine(link=link), 2)
    rates = {**measured().rates, "ddp": 256 / step}
    found = calibrate(measured(device="cuda", rates=rates, num_bytes=2e8))
    assert found.here.link.bits_per_second == pytest.approx(20e9, rel=0.1)
    assert step_seconds("ddp", found.work, found.here, 2) == pytest.approx(step, rel=0.01)


def test_ranks_take_turns_on_cores():
    assert on_cores(0.01, 2, 2) == 0.01
    assert on_cores(0.3, 3, 2) == pytest.approx(0.45)  # long work is shared evenly
    assert on_cores(0.001, 3, 2) == pytest.approx(0.002)  # short work is not cut
    assert on_cores(0.01, 4, 2) == pytest.approx(0.02)


def test_the_slowest_of_several_is_as_slow_as_order_statistics_say():
    assert expected_max(1) == 0
    assert expected_max(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-4)
    assert expected_max(100) == pytest.approx(2.5076, rel=1e-3)  # from tables of normal scores
    assert expected_max(1000) == pytest.approx(3.2414, rel=1e-3)
