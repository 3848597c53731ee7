"""Checks of the exercises about results, which run in the notebook.  Runs in the kernel."""

import math
from typing import Any

from ddpnb.course.exercises import Check, expect

CLOSE = 0.02
"""Maximum relative error of a number that a student computes from a table."""


def efficiency(efficiency: float, race: Any) -> None:
    """Check the efficiency of ``ddp``: its speed divided by N times the speed of ``single``."""
    frame = race.runs().set_index("strategy")
    speed = frame["samples_per_second"]
    expect(
        not math.isclose(efficiency, speed["ddp"] / speed["single"], rel_tol=CLOSE),
        f"{efficiency:.3g} is the speed-up of ddp, but the exercise asks for the efficiency.",
    )
    expected = speed["ddp"] / (frame["num_devices"]["ddp"] * speed["single"])
    expect(
        math.isclose(efficiency, expected, rel_tol=CLOSE),
        f"{efficiency:.3g} is not the efficiency of ddp in the race.",
    )


def bigger_batch(race: Any, bigger: Any) -> None:
    """Check that ``bigger`` has a larger batch than ``race`` and a more efficient ``ddp``."""
    ours, theirs = (each.runs().set_index("strategy") for each in (bigger, race))
    expect("ddp" in ours.index, f"Compare ddp, too. Your strategies: {', '.join(ours.index)}.")
    batch, old_batch = ours["batch_size"]["ddp"], theirs["batch_size"]["ddp"]
    expect(batch > old_batch, f"Use a global batch larger than {old_batch}. Yours is {batch}.")
    share, old_share = ours["efficiency"]["ddp"], theirs["efficiency"]["ddp"]
    expect(share > old_share, f"The efficiency, {share:.0%}, must be higher than {old_share:.0%}.")


def mean_staleness(mean_staleness: float, stale: Any) -> None:
    """Check the mean staleness of the updates of ``async``."""
    steps = stale.steps()
    values = steps[steps["strategy"] == "async"]["staleness"]
    expect(
        not math.isclose(mean_staleness, steps["staleness"].fillna(0).mean(), rel_tol=CLOSE),
        f"{mean_staleness:.3g} is the mean over all strategies. Use only the steps of async.",
    )
    expect(
        math.isclose(mean_staleness, values.mean(), rel_tol=CLOSE),
        f"{mean_staleness:.3g} is not the mean staleness over the steps of async.",
    )


def enough_ranks(enough_ranks: int, forecast: Any) -> None:
    """Check the smallest number of ranks on which ``ddp`` is ten times as fast as on one rank."""
    points = forecast.prediction.points["ddp"]
    single = next((each.samples_per_second for each in points if each.num_ranks == 1), math.nan)
    fast = [each.num_ranks for each in points if each.samples_per_second >= 10 * single]
    expect(bool(fast), "Predict 1 rank and more ranks, until ddp is 10 times as fast as on 1 rank.")
    expect(
        enough_ranks == min(fast),
        f"{enough_ranks} is not the smallest number of ranks on which ddp is 10 times as fast as "
        "on 1 rank.",
    )


CHECKS_IN_NOTEBOOK: dict[str, Check] = {
    "1.1": efficiency,
    "1.2": bigger_batch,
    "5.1": mean_staleness,
    "7.1": enough_ranks,
}
