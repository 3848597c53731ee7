"""Evaluating a comparison's models takes at most a share of the training time."""

from dataclasses import replace

import pytest

from ddpnb.protocol.messages import Checked, RunSpec
from ddpnb.session.evaluation_budget import budgeted

CHECKED = Checked(
    num_samples=15_000,
    survives_deaths=False,
    num_held_out=5_000,
    seconds_per_judged=1e-3,
    seconds_per_trained=3e-3,
)


def judged(checked: Checked = CHECKED, num_ranks: int = 2, **changes) -> RunSpec:
    specs = [
        RunSpec(run_id=name, strategy=name, task="digits", **changes) for name in ("ddp", "dp")
    ]
    first, second = budgeted(specs, [checked, replace(checked, num_samples=15_000)], num_ranks)
    assert (first.eval_samples, first.num_points) == (second.eval_samples, second.num_points)
    assert first.notes == second.notes
    assert len(first.notes) <= 1
    return first


def seconds(spec: RunSpec, checked: Checked = CHECKED) -> float:
    held_out, each = min(spec.eval_samples or 10_000, 5_000), min(spec.eval_samples or 2_000, 5_000)
    num = held_out + (spec.eval_samples or 10_000) + (spec.num_points - 1) * each
    return num * checked.seconds_per_judged


@pytest.mark.parametrize("num_epochs", [0.2, 2])
def test_judging_takes_a_quarter_of_the_training_time(num_epochs):
    spec = judged(num_epochs=num_epochs)
    training = num_epochs * 15_000 / 2 * 3e-3
    assert spec.notes
    assert 0.03 * training < seconds(spec) <= max(0.5, training / 4)


def test_there_are_fewer_samples_first_and_then_fewer_points():
    found = [judged(num_epochs=num) for num in (2, 0.5)]
    assert [(spec.eval_samples, spec.num_points) for spec in found] == [(1_000, 10), (200, 10)]
    few = judged(replace(CHECKED, seconds_per_judged=1.0, seconds_per_trained=1.0), num_epochs=0.1)
    assert (few.eval_samples, few.num_points) == (100, 1)
    asked = judged(replace(CHECKED, seconds_per_judged=1.0), num_epochs=1, eval_every=0.1)
    assert (asked.eval_samples, asked.num_points) == (100, 10), "the user's points must stay"


@pytest.mark.parametrize(
    ("seconds_per_judged", "choices"),
    [(1e-6, {}), (0.0, {}), (1e-3, {"num_epochs": 100}), (1.0, {"eval_samples": 500})],
)
def test_all_is_judged_where_it_takes_little_or_is_asked_for(seconds_per_judged, choices):
    checked = replace(CHECKED, seconds_per_judged=seconds_per_judged)
    spec = judged(checked, **choices)
    assert (spec.eval_samples, spec.num_points) == (choices.get("eval_samples"), 10)
    assert spec.notes == ()
