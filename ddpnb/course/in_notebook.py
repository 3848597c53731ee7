"""Exercises about results: checked in the notebook (kernel)."""

import math
from typing import Any

from ddpnb.course.exercises import Check, expect

CLOSE = 0.02
"""Relative error of a number that a student computes from a table."""


def efficiency(efficiency: float, race: Any) -> None:
    """The speed of ddp over that of as many single devices."""
    frame = race.to_frame().set_index("strategy")
    speed = frame["samples_per_second"]
    expect(
        not math.isclose(efficiency, speed["ddp"] / speed["single"], rel_tol=CLOSE),
        "that is the speed-up; efficiency is its share of what all devices could reach.",
    )
    expected = speed["ddp"] / (frame["num_devices"]["ddp"] * speed["single"])
    expect(
        math.isclose(efficiency, expected, rel_tol=CLOSE),
        "take samples/s of ddp and of single from the table, and the number of devices.",
    )


def bigger_batch(race: Any, bigger: Any) -> None:
    """With a larger global batch ``ddp`` is more efficient than in the race."""
    ours, theirs = (each.to_frame().set_index("strategy") for each in (bigger, race))
    expect("ddp" in ours.index, "train ddp, to compare it with the race's.")
    expect(
        ours["batch_size"]["ddp"] > theirs["batch_size"]["ddp"],
        "the global batch has to be larger than in the race.",
    )
    expect(
        ours["efficiency"]["ddp"] > theirs["efficiency"]["ddp"],
        "ddp is no more efficient than in the race: change the batch alone.",
    )


def mean_staleness(mean_staleness: float, stale: Any) -> None:
    """The mean staleness of the updates of ``async``."""
    steps = stale.steps()
    values = steps[steps["strategy"] == "async"]["staleness"]
    expect(
        not math.isclose(mean_staleness, steps["staleness"].fillna(0).mean(), rel_tol=CLOSE),
        "take the rows of async alone: other strategies have no staleness.",
    )
    expect(
        math.isclose(mean_staleness, values.mean(), rel_tol=CLOSE),
        "average the column staleness over the steps of async.",
    )


def enough_ranks(enough_ranks: int, forecast: Any) -> None:
    """The smallest number of ranks on which ``ddp`` is ten times as fast as on one."""
    points = forecast.prediction.points["ddp"]
    single = next((each.samples_per_second for each in points if each.num_ranks == 1), math.nan)
    fast = [each.num_ranks for each in points if each.samples_per_second >= 10 * single]
    expect(bool(fast), "predict 1 rank and more of them: none here is ten times as fast as one.")
    expect(
        enough_ranks == min(fast), "take the smallest number that is at least ten times as fast."
    )


CHECKS: dict[str, Check] = {
    "1.1": efficiency,
    "1.2": bigger_batch,
    "5.1": mean_staleness,
    "7.1": enough_ranks,
}
