"""Each strategy is compared at its best learning rate, and runs at other rates are kept."""

import math
from dataclasses import replace

import pytest

from ddpnb.reports.formatting import notes
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.comparison import Comparison, magic_of
from ddpnb.results.frames import runs_frame, strategy_rows
from ddpnb.results.run import RunSnapshot, Status
from tests.unit.reports.test_tables import results_table
from tests.unit.results.fake_runs import fake_run

RATES = (0.02, 0.05, 0.1)
NAN = math.nan


def run(
    name: str,
    rate: float,
    loss: float,
    *,
    repeat: int = 0,
    status: Status = Status.FINISHED,
) -> RunSnapshot:
    made = fake_run(name, repeat=repeat, num_steps=20).snapshot()
    scored = [replace(each, held_out_loss=loss, num_held_out=360) for each in made.reports]
    return replace(
        made,
        run_id=f"{name}:{rate}:{repeat}",
        spec=replace(made.spec, learning_rate=rate, rates=RATES),
        status=status,
        reports=tuple(scored),
        created=made.created + rate,
    )


def compared(*runs: RunSnapshot) -> Comparison:
    specs = tuple(run.spec for run in runs if run.spec)
    start = Comparison(comparison_id="id", name="digits-1", task="digits", specs=specs)
    return start.with_runs(runs)


def rates_of(comparison: Comparison) -> dict[str, float]:
    return {run.name: run.spec.learning_rate for run in comparison.runs if run.spec}


STOPPED, FAILED, RUNNING = Status.STOPPED, Status.FAILED, Status.RUNNING


@pytest.mark.parametrize(
    ("runs", "best"),
    [
        ([(0.02, 0.4), (0.05, 0.3), (0.1, 0.35)], 0.05),
        ([(0.1, 0.3), (0.05, 0.3)], 0.05),
        ([(0.02, NAN), (0.05, math.inf), (0.1, 2.0)], 0.1),
        ([(0.1, NAN), (0.05, math.inf), (0.02, NAN)], 0.02),
        ([(0.02, 0.4), (0.05, 0.1, STOPPED)], 0.02),
        ([(0.02, NAN), (0.05, 0.5, STOPPED)], 0.05),
        ([(0.02, NAN, FAILED), (0.05, 0.5)], 0.05),
        ([(0.02, 0.4), (0.05, NAN, RUNNING)], 0.05),  # a run that still trains is drawn
    ],
)
def test_the_lowest_held_out_loss_wins_and_one_that_diverged_never(
    runs: list[tuple[float, float, Status]] | list[tuple[float, float]], best: float
):
    made = [
        run("ddp", rate, loss, status=status[0] if status else Status.FINISHED)
        for rate, loss, *status in runs
    ]
    comparison = compared(*made)
    assert rates_of(comparison) == {"ddp": best}
    assert len(comparison.runs) == 1
    assert comparison.all_runs == tuple(sorted(made, key=lambda run: run.created))


def tuned() -> Comparison:
    return compared(
        run("single", 0.02, 0.30),
        run("ddp", 0.02, 0.40),
        run("single", 0.05, 0.35),
        run("ddp", 0.05, 0.30),
        run("single", 0.1, NAN),
        run("ddp", 0.1, 0.50),
        run("single", 0.02, 0.33, repeat=1),
        run("ddp", 0.05, 0.90, repeat=1),
    )


def test_later_repeats_are_compared_with_the_run_that_won():
    comparison = tuned()
    assert [(r.name, r.repeat, r.spec.learning_rate) for r in comparison.runs if r.spec] == [
        ("single", 0, 0.02),
        ("single", 1, 0.02),
        ("ddp", 0, 0.05),
        ("ddp", 1, 0.05),
    ]
    assert len(comparison.other_rates) == 4
    assert "--lr 0.02,0.05,0.1 " in magic_of(comparison)
    frame = runs_frame(comparison)
    assert len(frame) == 8
    best = frame[frame.is_compared].groupby("strategy").learning_rate.unique()
    assert best.to_dict() == {"ddp": [0.05], "single": [0.02]}


def test_the_table_says_how_the_rates_were_chosen():
    table = results_table(tuned())
    assert table.to_frame()["lr"].astype(float).tolist() == [0.02, 0.05]
    (note,) = [note for note in table.notes if "by lr" in note]
    assert "single 0.02: 0.300, 0.05: 0.350, 0.1: diverged; ddp 0.02: 0.400, 0.05: 0.300" in note
    unknown = compared(*[replace(run("ddp", rate, NAN), reports=()) for rate in RATES])
    assert "diverged" not in " ".join(notes(unknown, ()))


@pytest.mark.parametrize("num_repeats", [1, 2, 3])
def test_scores_of_the_repeat_that_chose_the_rate_are_left_out_or_marked(num_repeats: int):
    """In repeat 1, the samples of the score have also chosen the rate."""
    runs = [run("ddp", rate, loss) for rate, loss in ((0.02, 0.1), (0.05, 0.2))]
    runs += [run("ddp", 0.02, 0.5, repeat=repeat) for repeat in range(1, num_repeats)]
    comparison = compared(*runs)
    (row,) = strategy_rows(comparison)
    assert row["held_out_loss"] == (0.5 if num_repeats > 1 else 0.1)
    assert (row["num_runs"], row["num_scored"]) == (num_repeats, max(num_repeats - 1, 1))
    said = ComparisonResult(comparison).text()
    assert ("whose held-out samples chose the learning rate" in said) == (num_repeats == 1)
    note = "look too good" if num_repeats == 1 else "scores leave out repeat 1"
    assert note in said
