"""Loss, speed and the time of steps, from the aggregate of a run.  (Kernel.)"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddpnb.history.aggregate import Curve, RankAggregate
from ddpnb.history.database import Floats
from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.messages import NO_PARTS, MarkKind, Parts

SMOOTHED_SHARE = 0.05
"""At each point the moving average spans one update and this share of the samples so far."""


def smoothed_loss(run: RunSnapshot) -> Floats:
    """Return the moving average of the loss at each point of the curve.

    Its span is one update and a share of the samples so far, not of all that are planned.  So
    what is drawn stays, and a short and a long run reach the same loss at the same sample.
    Early, where the loss falls fast, the span is short, and the line does not lag behind its
    points: where the loss falls like ``1 / samples``, it is soon only a twentieth above them.
    """
    return smoothed(run.aggregate.curve)


def smoothed(curve: Curve) -> Floats:
    """Return the moving average of a curve, as of the loss."""
    if len(curve) == 0:
        return curve.loss
    if curve.samples[-1] == 0:  # a hand-written loop that logs no samples
        return smooth(curve.loss, curve.updates, 1 + SMOOTHED_SHARE * curve.updates)
    update = curve.samples[-1] / curve.num_updates
    return smooth(curve.loss, curve.samples, update + SMOOTHED_SHARE * curve.samples)


def smooth(loss: Floats, samples: Floats, spans: Floats) -> Floats:
    """Return the exponential moving average over ``spans`` samples, without start-up bias.

    A point ``d`` samples after the one before it weighs ``1 - exp(-d / span)``.  The sum is
    divided by the weights so far, as in Adam, so the first average is the first point.  NaN
    points stay NaN and leave the average as it is.

    Args:
        loss: at each point.
        samples: seen up to each point; never fall.
        spans: the span at each point, in samples; greater than 0.
    """
    smoothed = np.full(len(loss), np.nan)
    shares = -np.expm1(-np.diff(samples, prepend=0.0) / spans)
    total = weight = 0.0
    for index, (value, share) in enumerate(zip(loss.tolist(), shares.tolist(), strict=True)):
        if math.isfinite(value) and share > 0:
            total += share * (value - total)
            weight += share * (1.0 - weight)
            smoothed[index] = total / weight
    return smoothed


def first_reached(y: Floats, x: Floats, target: float) -> float:
    """Return the ``x`` at which ``y`` first is as low as ``target``; NaN if it never is.

    Between two points ``y`` is interpolated linearly; NaN points are left out.
    """
    known = np.isfinite(y)
    y, x = y[known], x[known]
    below = np.flatnonzero(y <= target)
    if len(below) == 0:
        return math.nan
    at = int(below[0])
    if at == 0:
        return float(x[0])
    share = (y[at - 1] - target) / (y[at - 1] - y[at])
    return float(x[at - 1] + share * (x[at] - x[at - 1]))


def throughput(curve: Curve, window: float, max_points: int = 160) -> tuple[Floats, Floats]:
    """Return seconds, and samples/s over the ``window`` seconds before each.

    Between updates, samples are interpolated linearly.  A run shorter than one window gives
    one point: its mean.
    """
    if len(curve) == 0 or curve.seconds[-1] <= 0:
        return np.empty(0), np.empty(0)
    end = float(curve.seconds[-1])
    window = min(window, end)
    at = np.linspace(window, end, max_points) if end > window else np.array([end])
    return at, (samples_at(curve, at) - samples_at(curve, at - window)) / window


def window_for(seconds: float) -> float:
    """Return a round window, about a twelfth of ``seconds``, that seldom changes."""
    target = max(seconds, 1e-3) / 12
    unit = 10.0 ** math.floor(math.log10(target))
    return unit * max(step for step in (1.0, 2.0, 5.0) if step * unit <= target * (1 + 1e-9))


def tenths(curve: Curve) -> Floats:
    """Return samples/s in each tenth of the run's samples; empty below ten updates."""
    if curve.num_updates < 10 or curve.samples[-1] <= 0 or curve.seconds[-1] <= 0:
        return np.empty(0)
    bounds = np.linspace(0.0, curve.samples[-1], 11)
    at = np.interp(bounds, np.append(0.0, curve.samples), np.append(0.0, curve.seconds))
    seconds = np.diff(at)
    rates: Floats = (curve.samples[-1] / 10) / seconds[seconds > 0]
    return rates


def samples_at(curve: Curve, seconds: Floats) -> Floats:
    """Return how many samples had been seen at each moment."""
    samples: Floats = np.interp(
        seconds, np.append(0.0, curve.seconds), np.append(0.0, curve.samples)
    )
    return samples


def num_diverged(run: RunSnapshot) -> int:
    """Return how many losses are infinite, or NaN although others were logged."""
    aggregate = run.aggregate
    never_logged = run.spec is None and aggregate.num_diverged == aggregate.num_events
    return 0 if never_logged else aggregate.num_diverged


Absences = Mapping[int, Sequence[tuple[float, float]]]
"""Periods, in training seconds, without each rank; a rank that was never absent is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The mean step of a strategy; seconds of one worker."""

    parts: Parts = NO_PARTS
    num_bytes_sent: float = math.nan
    """What one worker sent in one step."""

    @property
    def seconds(self) -> float:
        """The whole step; hidden communication takes no time of its own."""
        return sum(self.parts) - self.parts.hidden

    @property
    def is_known(self) -> bool:
        """Whether the ranks reported any part."""
        return self.seconds > 0

    @property
    def exposed_share(self) -> float:
        """Share of the step spent on exchanging tensors or waiting for other ranks."""
        if not self.is_known:
            return math.nan
        return (self.parts.communication + self.parts.waiting) / self.seconds


def step_split(runs: Sequence[RunSnapshot]) -> StepSplit:
    """Return the mean step over all ranks and repeats."""
    ranks = [rank for run in runs for rank in run.aggregate.ranks if rank.num_steps]
    num_steps = sum(rank.num_steps for rank in ranks)
    if num_steps == 0:
        return StepSplit()
    totals = np.sum([rank.parts for rank in ranks], axis=0) / num_steps
    sent = sum(rank.num_bytes_sent for rank in ranks)
    return StepSplit(
        parts=Parts(*totals.tolist()), num_bytes_sent=sent / num_steps if sent else math.nan
    )


def slowness(ranks: Sequence[RankAggregate]) -> dict[int, float]:
    """Return each rank's own time of a step (``own_seconds``) over that of the fastest rank."""
    means = {
        rank.rank: float(np.nanmedian(rank.own_seconds)) for rank in ranks if len(rank.own_seconds)
    }
    fastest = min(means.values(), default=0.0)
    return {rank: mean / fastest for rank, mean in means.items()} if fastest > 0 else {}


def absences(run: RunSnapshot) -> Absences:
    """Return when ranks that died were absent; one that is still absent is so to infinity."""
    periods: dict[int, list[tuple[float, float]]] = {}
    steps = {rank.rank: rank.at_seconds for rank in run.aggregate.ranks}
    for mark in sorted(run.marks, key=lambda mark: mark.seconds):
        own = periods.get(mark.rank, [])
        is_absent = bool(own) and math.isinf(own[-1][1])
        if mark.kind in (MarkKind.KILLED, MarkKind.DIED) and not is_absent:
            before = [at for at in steps.get(mark.rank, ()) if at <= mark.seconds]
            periods[mark.rank] = [*own, (max(before, default=0.0), math.inf)]
        elif mark.kind is MarkKind.CAME_BACK and is_absent:
            own[-1] = _longest_pause(steps.get(mark.rank, np.empty(0)), own[-1][0], mark.seconds)
    return periods


def _longest_pause(at_seconds: Floats, begin: float, end: float) -> tuple[float, float]:
    """Return the longest time between two steps of a rank, as marks may come a little late."""
    within = at_seconds[(begin < at_seconds) & (at_seconds < end)]
    at = np.concatenate([[begin], within, [end]])
    longest = int(np.argmax(np.diff(at)))
    return float(at[longest]), float(at[longest + 1])


class Efficiency(NamedTuple):
    """The parts of efficiency, which is their product; NaN where they are not known."""

    machine: float
    communication: float


def efficiency_of(of_ceiling: float, of_single: float, num_devices: int) -> Efficiency:
    """Return the parts of efficiency.

    Args:
        of_ceiling: samples/s over those of the ceiling.
        of_single: samples/s of the ceiling over those of ``single``.
        num_devices: 0 for ``single`` itself, of which neither part means anything.
    """
    if num_devices == 0:
        return Efficiency(math.nan, math.nan)
    return Efficiency(of_single / num_devices, of_ceiling)
