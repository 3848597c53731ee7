"""Computes a run's curve of at most ``MAX_POINTS`` points from one row per step.

Step k of all synchronous workers is one update.  Each step of an asynchronous worker and each call
of ``ddpnb.log`` is a separate update, and these updates are ordered by time.  Each point merges 2^k
neighbouring updates, so that drawn points do not move.  Runs in the kernel.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from ddpnb.protocol.messages import RunHeader
from ddpnb.results.rows import Floats, Records

MAX_POINTS = 360
"""Maximum number of points in a curve: about one point for every two pixels of the panel."""

SMOOTHED_SHARE = 0.05
"""The moving average at each point spans one update plus this share of the samples so far."""


def _nothing() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A run's loss, or another number, over all updates.  All arrays have the same length.

    Each point merges ``num_merged`` updates.  The last point may merge fewer updates.
    """

    samples: Floats = field(default_factory=_nothing)
    """Number of samples that all workers have seen at the end of the point's updates."""
    seconds: Floats = field(default_factory=_nothing)
    """Training seconds at the end of the point's updates.  These seconds never decrease."""
    mean: Floats = field(default_factory=_nothing)
    """Mean of the finite values of the updates, weighted by samples; NaN if no value is finite."""
    lowest: Floats = field(default_factory=_nothing)
    highest: Floats = field(default_factory=_nothing)
    num_bad: Floats = field(default_factory=_nothing)
    """Number of updates with a NaN or infinite value."""
    num_merged: int = 1
    num_updates: int = 0

    def __len__(self) -> int:
        return len(self.mean)


def curve_of(rows: Records, header: RunHeader | None, values: Floats | None = None) -> Curve:
    """Return the curve of a run's steps.

    Args:
        rows: one row for each step of each worker, in any order.
        header: the header of the run; None for a hand-written loop.
        values: the value of each row; by default the loss.
    """
    values = rows["loss"] if values is None else values
    samples = rows["num_samples"].astype(np.float64)
    seconds = rows["seconds"]
    if header is not None and header.synchronous:
        step = rows["step"]
        num_steps = int(step.max(initial=-1)) + 1
        made = np.bincount(step, minlength=num_steps) > 0
        weighted = np.where(samples > 0, values, 0.0) * samples
        samples = np.bincount(step, samples, num_steps).astype(np.float64)[made]
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.bincount(step, weighted, num_steps)[made] / samples
        ends = np.full(num_steps, -np.inf)
        np.maximum.at(ends, step, seconds)
        seconds = ends[made]
    else:
        order = np.argsort(seconds, kind="stable")
        values, samples, seconds = values[order], samples[order], seconds[order]
    return _merged(values, samples, seconds)


def _merged(values: Floats, samples: Floats, seconds: Floats) -> Curve:
    """Return the curve of updates that are in order.  NaN and infinite values count as bad."""
    if len(values) == 0:
        return Curve()
    num_merged = 1
    while len(values) > MAX_POINTS * num_merged:
        num_merged *= 2
    starts = np.arange(0, len(values), num_merged)
    ends = np.append(starts[1:], len(values)) - 1
    is_finite = np.isfinite(values)
    known = np.where(is_finite, values, np.nan)
    weight = np.where(is_finite, np.where(samples > 0, samples, 1.0), 0.0)
    weighted = np.where(is_finite, values, 0.0) * weight
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(weighted, starts) / np.add.reduceat(weight, starts)
    return Curve(
        samples=np.cumsum(samples)[ends],
        seconds=np.maximum.accumulate(np.maximum(seconds, 0.0))[ends],
        mean=mean,
        lowest=np.fmin.reduceat(known, starts),
        highest=np.fmax.reduceat(known, starts),
        num_bad=np.add.reduceat((~is_finite).astype(np.float64), starts),
        num_merged=num_merged,
        num_updates=len(values),
    )


def complete_steps(rows: Records, num_ranks: int) -> Records:
    """Return all rows before the first step that at least one rank has not reported."""
    counts = np.bincount(rows["step"])
    missing = np.flatnonzero((counts > 0) & (counts < num_ranks))
    return rows[rows["step"] < missing[0]] if len(missing) else rows


def waiting_seconds(rows: Records) -> Floats:
    """Return the seconds for which each synchronous step's rank waited for other ranks.

    An exchange ends on all ranks at the same time.  So the rank that begins the exchange last has
    the shortest communication.  The other ranks have waited for the difference:

        waiting_i = communication_i - min over ranks j of communication_j, in the same step
    """
    step, communication = rows["step"], rows["communication"].astype(np.float64)
    least = np.full(int(step.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least, step, communication)
    waited: Floats = communication - least[step]
    return waited


def smoothed(curve: Curve) -> Floats:
    """Return the exponential moving average of a curve, without start-up bias.

    The span is one update plus a share of the samples so far, not of the planned samples.  So drawn
    points do not move, and short and long runs reach the same loss at the same sample.  At first
    the span is short, so that the line follows a fast fall of the loss.  If the loss falls like
    ``1 / samples``, the line is soon only 5 % above the points.

    A point ``d`` samples after the previous point has the weight ``1 - exp(-d / span)``.  The sum
    is divided by all weights so far, as in Adam.  So the first average equals the first point.
    NaN points stay NaN and do not change the average.
    """
    averages = np.full(len(curve), np.nan)
    if len(curve) == 0:
        return averages
    at = curve.samples
    if at[-1] == 0:  # a loop may log no samples
        at = np.arange(1.0, len(curve) + 1) * curve.num_merged
    spans = at[-1] / curve.num_updates + SMOOTHED_SHARE * at
    shares = -np.expm1(-np.diff(at, prepend=0.0) / spans)
    total = weight = 0.0
    for index, (value, share) in enumerate(zip(curve.mean.tolist(), shares.tolist(), strict=True)):
        if math.isfinite(value) and share > 0:
            total += share * (value - total)
            weight += share * (1.0 - weight)
            averages[index] = total / weight
    return averages


def end_of(curve: Curve) -> float:
    """Return the last value of a curve's moving average; NaN before the first point."""
    known = [value for value in smoothed(curve).tolist() if math.isfinite(value)]
    return known[-1] if known else math.nan


def tenths(curve: Curve) -> Floats:
    """Return samples/s in each tenth of a run's samples; empty for fewer than ten updates."""
    if curve.num_updates < 10 or curve.samples[-1] <= 0:
        return np.empty(0)
    bounds = np.linspace(0.0, curve.samples[-1], 11)
    at = np.interp(bounds, np.append(0.0, curve.samples), np.append(0.0, curve.seconds))
    seconds = np.diff(at)
    rates: Floats = (curve.samples[-1] / 10) / seconds[seconds > 0]
    return rates


def first_reached(y: Floats, x: Floats, target: float) -> float:
    """Return the first ``x`` at which ``y`` is at most ``target``; NaN if there is no such ``x``.

    ``y`` is interpolated linearly between two points.  NaN points are ignored.
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
