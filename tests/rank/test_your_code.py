"""Whatever a cell defines, every strategy trains it: any batch, any step, any measure."""

import math
from pathlib import Path

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.training import validation
from tests.rank import runs
from tests.rank.ranks import RankFailedError, make_state
from tests.rank.runs import (
    FEATURED,
    check_job,
    marks_of,
    steps_of,
    total_losses,
    train_job,
)
from tests.rank.sources import (
    CELL,
    CLOSURE,
    GAN,
    IN_GROUPS,
    MEETS,
    MIXTURE,
    ON_A_DICT,
    RAGGED,
    TUPLES,
)

WEAK = {"local-sgd", "diloco", "async", "hogwild"}
"""Strategies that do not make exactly the updates of one process on several ranks."""


def spec_of(strategy: str, source: str = CELL, **changes):
    values = {"num_epochs": 1, "batch_size": 20}
    return runs.spec_of(strategy, source=source, **values | changes)


def assert_alike(ranks, strategy: str, one: str, other: str, **changes) -> None:
    """Two cells train alike, on one rank and on two."""
    for num_ranks in (1, 2):
        first, second = (
            ranks(num_ranks).call(train_job, spec_of(strategy, source, **changes))
            for source in (one, other)
        )
        if num_ranks == 1 or strategy not in WEAK:
            assert total_losses(second) == pytest.approx(total_losses(first), abs=1e-5)
            expected = pytest.approx(first[0][0].held_out_loss, abs=1e-5)
            assert second[0][0].held_out_loss == expected


@pytest.mark.parametrize("strategy", FEATURED)
def test_a_step_on_a_dict_trains_exactly_as_the_shorthand(ranks, strategy):
    assert_alike(ranks, strategy, CELL, ON_A_DICT, accumulate=2)
    results = ranks(2).call(train_job, spec_of(strategy, ON_A_DICT))
    assert math.isnan(results[0][0].held_out_accuracy)
    shares = [step.metrics["right"] for result in results for step in steps_of(result)]
    assert len(shares) >= 5
    assert all(0 <= share <= 1 for share in shares)


NAMED = "\ndef optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.05)\n"


@pytest.mark.parametrize("strategy", FEATURED)
@pytest.mark.parametrize("optimizer", ["", NAMED])
def test_layers_that_a_closure_calls_are_trained(ranks, strategy, optimizer):
    assert_alike(ranks, strategy, CELL + optimizer, CLOSURE + optimizer)


def under_a_default_device_job(state, folder, spec):
    """What the cell itself makes says where; what ddpnb makes must not end up on the default."""
    torch.set_default_device("meta")
    try:
        return train_job(state, folder, spec)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("strategy", [*FEATURED, "zero", "diloco"])
def test_a_default_device_of_the_users_is_for_the_users_own_tensors(ranks, strategy):
    source = CELL.replace("16)", '16, device="cpu")').replace("2))", '2, device="cpu"))')
    source = source.replace("50, 4)", '50, 4, device="cpu")')
    found, usual = (
        ranks(2).call(job, spec_of(strategy, source))
        for job in (under_a_default_device_job, train_job)
    )
    if strategy not in WEAK:
        assert total_losses(found) == total_losses(usual)
    assert math.isfinite(found[0][0].held_out_loss)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "async"])
def test_a_batch_without_rows_trains_where_it_is_not_split(ranks, strategy):
    alone = total_losses(ranks(1).call(train_job, spec_of("single", RAGGED)))
    found = ranks(2).call(train_job, spec_of(strategy, RAGGED))
    if strategy not in WEAK:
        assert total_losses(found) == pytest.approx(alone, abs=1e-5)
    assert math.isfinite(found[0][0].held_out_loss)


@pytest.mark.parametrize(
    ("source", "accumulate", "said"),
    [
        (RAGGED, 2, "cannot be split"),
        (RAGGED.replace('), batch["y"])', '), batch["y"], reduction="sum")'), 1, "is a sum"),
    ],
)
def test_what_is_wrong_with_a_batch_without_rows_is_found(source, accumulate, said):
    spec = spec_of("single", source, accumulate=accumulate)
    with pytest.raises(UserError, match=said):
        validation.validate(spec, state=make_state(0, 1), namespace={})


@pytest.mark.parametrize("strategy", FEATURED)
def test_with_a_loss_of_ones_own_the_model_returns_anything(ranks, strategy):
    (one, _), *_ = ranks(1).call(train_job, spec_of("single", TUPLES))
    report, _ = ranks(2).call(train_job, spec_of(strategy, TUPLES))[0]
    if strategy != "async":
        assert report.held_out_loss == pytest.approx(one.held_out_loss, abs=1e-6)
    assert math.isnan(report.held_out_accuracy)
    assert report.held_out_metrics == {"f1": 0.25, "size": 100.0}


def test_a_validation_step_is_averaged_over_the_samples_and_may_hold_the_loss(ranks):
    source = CELL + (
        "def validation_step(model, batch):\n"
        "    assert not model.training and not torch.is_grad_enabled()\n"
        "    return {'loss': 3.0, 'size': torch.tensor(len(batch[0]))}\n"
    )
    report, _ = ranks(1).call(train_job, spec_of("single", source))[0]
    assert report.held_out_loss == 3.0
    assert report.held_out_metrics == {"size": pytest.approx((2 * 20 * 20 + 10 * 10) / 50)}
    assert math.isnan(report.held_out_accuracy)
    assert report.final_loss < 1


def test_a_metric_gets_what_a_validation_step_returns_of_a_dict(ranks):
    source = ON_A_DICT + (
        "def metric(outputs, targets): return {'number': len(outputs) + len(targets)}\n"
        "def validation_step(model, batch): return torch.ones(len(batch['y'])), batch['y']\n"
    )
    report, _ = ranks(1).call(train_job, spec_of("single", source))[0]
    assert report.held_out_metrics == {"number": 100}
    assert math.isfinite(report.held_out_loss)


@pytest.mark.parametrize("strategy", [*FEATURED, "ddp:find_unused_parameters=on"])
def test_a_mixture_of_experts_trains_where_unused_parameters_are_allowed(ranks, strategy):
    spec = spec_of(strategy, MIXTURE)
    if strategy in ("ddp", "fsdp"):
        with pytest.raises(UserError, match=r"experts\.\d\.weight"):
            validation.validate(spec, state=make_state(0, 2), namespace={})
        return
    validation.validate(spec, state=make_state(0, 2), namespace={})
    report, _ = ranks(2).call(train_job, spec)[0]
    assert math.isfinite(report.final_loss)


@pytest.mark.parametrize("strategy", [*FEATURED, "zero", "central", "hogwild", "local-sgd"])
def test_groups_by_name_and_a_scheduler_go_wherever_the_optimizer_lives(ranks, strategy):
    alone = ranks(1).call(train_job, spec_of("single", IN_GROUPS, num_epochs=3))
    plain = ranks(1).call(train_job, spec_of("single", num_epochs=3))
    assert total_losses(alone)[-5:] != pytest.approx(total_losses(plain)[-5:], abs=1e-3)
    for num_ranks in (1, 2):
        found = ranks(num_ranks).call(train_job, spec_of(strategy, IN_GROUPS, num_epochs=3))
        if num_ranks == 1 or strategy not in WEAK:
            assert total_losses(found) == pytest.approx(total_losses(alone), abs=1e-5)
        assert found[0][0].held_out_loss < 0.6


def test_a_class_of_ones_own_needs_neither_loss_nor_optimizer(ranks):
    assert [each.num_samples for each in ranks(2).call(check_job, spec_of("Gan", GAN))] == [60, 60]
    result, _ = ranks(2).call(train_job, spec_of("Gan", GAN))
    assert all(0 < loss < 3 for loss in total_losses([result]))
    assert math.isnan(result[0].held_out_loss)
    assert marks_of(result) == []
    measured = GAN + "def validation_step(model, batch): return {'judged': 0.5, 'loss': 1.0}"
    (report, _), _ = ranks(2).call(train_job, spec_of("Gan", measured))
    assert (report.held_out_loss, report.held_out_metrics) == (1.0, {"judged": 0.5})


def test_what_is_wrong_in_it_is_found_before_anything_trains(ranks):
    with pytest.raises(RankFailedError, match=r"Gan\.step"):
        ranks(2).call(check_job, spec_of("Gan", GAN.replace("return loss", "return None")))


def check_in_job(state, folder, path, spec):
    return check_job(state, Path(path), spec)


def test_a_class_of_ones_own_is_checked_in_a_shared_folder_and_with_its_weights(ranks, tmp_path):
    ranks(2).call(check_in_job, str(tmp_path), spec_of("Meets", MEETS, batch_size=21))
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in made} == {validation.CHECKS}
    assert len(made) == 2


def test_a_step_that_returns_nothing_later_on_is_one_sentence(ranks):
    step = '    return {"loss"'
    source = ON_A_DICT.replace(step, f"    if len(scores) == 20: return\n{step}")
    with pytest.raises(RankFailedError, match=r"UserError: training_step\(model, batch\)"):
        ranks(1).call(train_job, spec_of("single", source))
