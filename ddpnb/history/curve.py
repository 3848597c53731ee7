"""The curve of a run, made of one row per step; bounded however long it trains.  (Kernel.)

Synchronous workers make step k together: one update.  Each step of an asynchronous worker, and
each call of ``ddpnb.log``, is an update of its own; these are ordered by time.  Neighbouring
updates are merged, always a power of two of them, so that a point stays where it is drawn.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ddpnb.history.rows import Floats, Records
from ddpnb.protocol.messages import RunHeader

MAX_POINTS = 360
"""The most points of a curve: at least one for every other pixel of its panel."""

THROUGHPUT_POINTS = 160

SMOOTHED_SHARE = 0.05
"""At each point the moving average spans one update and this share of the samples so far."""


def _nothing() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One number of a run by its updates, all workers together; arrays of equal length.

    Each point stands for ``num_merged`` updates, the last one for the rest, and sits at their end.
    """

    samples: Floats = field(default_factory=_nothing)
    """Samples seen by all workers together, these updates included."""
    seconds: Floats = field(default_factory=_nothing)
    """Training seconds at the end of the updates; never falls."""
    mean: Floats = field(default_factory=_nothing)
    """Mean over the updates that are finite, weighted by samples; NaN if none is."""
    weight: Floats = field(default_factory=_nothing)
    """What the mean of each point weighs."""
    lowest: Floats = field(default_factory=_nothing)
    highest: Floats = field(default_factory=_nothing)
    num_bad: Floats = field(default_factory=_nothing)
    """Updates with a NaN or infinite value."""
    num_merged: int = 1
    num_updates: int = 0

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def updates(self) -> Floats:
        """Updates made up to each point."""
        made: Floats = np.minimum(
            np.arange(1.0, len(self) + 1) * self.num_merged, float(self.num_updates)
        )
        return made

    def extended(self, values: Floats, samples: Floats, seconds: Floats) -> "Curve":
        """Return this curve with more updates at its end; if there are too many, two become one.

        Args:
            values: of each update; NaN or infinite ones count as bad.
            samples: of each update alone.
            seconds: the training time at its end.
        """
        if len(values) == 0:
            return self
        seen, passed = (self.samples[-1], self.seconds[-1]) if len(self) else (0.0, 0.0)
        is_finite = np.isfinite(values)
        known = np.where(is_finite, values, np.nan)
        weight = np.where(is_finite, np.where(samples > 0, samples, 1.0), 0.0)
        num_updates = self.num_updates + len(values)
        grown = Curve(
            samples=np.append(self.samples, seen + np.cumsum(samples)),
            seconds=np.append(self.seconds, np.maximum.accumulate(np.maximum(seconds, passed))),
            mean=np.append(self.mean, known),
            weight=np.append(self.weight, weight),
            lowest=np.append(self.lowest, known),
            highest=np.append(self.highest, known),
            num_bad=np.append(self.num_bad, ~is_finite),
            num_merged=self.num_merged,
            num_updates=num_updates,
        )
        bins = np.arange(self.num_updates, num_updates) // self.num_merged
        bins = np.append(np.arange(len(self)), bins)
        grown = _merged(grown, np.flatnonzero(np.diff(bins, prepend=-1)))
        while len(grown) > MAX_POINTS:
            grown = _merged(grown, np.arange(0, len(grown), 2))
            grown = replace(grown, num_merged=2 * grown.num_merged)
        return grown


def _merged(curve: Curve, starts: NDArray[np.intp]) -> Curve:
    """Return a curve with one point for those from each start to the next."""
    if len(starts) == len(curve):
        return curve
    weight = np.add.reduceat(curve.weight, starts)
    weighted = np.where(curve.weight > 0, curve.mean, 0.0) * curve.weight
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(weighted, starts) / weight
    return replace(
        curve,
        samples=np.maximum.reduceat(curve.samples, starts),
        seconds=np.maximum.reduceat(curve.seconds, starts),
        mean=mean,
        weight=weight,
        lowest=np.fmin.reduceat(curve.lowest, starts),
        highest=np.fmax.reduceat(curve.highest, starts),
        num_bad=np.add.reduceat(curve.num_bad, starts),
    )


def curve_of(
    rows: Records,
    header: RunHeader | None,
    name: str = "loss",
    *,
    after: Curve | None = None,
) -> Curve:
    """Return the curve of a run's steps.

    Args:
        rows: one for each step of each worker, in any order.
        header: of the run; None for a hand-written loop.
        name: the field of the rows that is drawn.
        after: the curve of the steps before these; None: there are none.
    """
    values, samples = rows[name].astype(np.float64), rows["num_samples"].astype(np.float64)
    seconds = rows["seconds"]
    if header is not None and header.synchronous:
        _, step = np.unique(rows["step"], return_inverse=True)
        num_steps = int(step.max(initial=-1)) + 1
        weighted = np.where(samples > 0, values, 0.0) * samples
        samples = np.bincount(step, samples, num_steps).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.bincount(step, weighted, num_steps) / samples
        ends = np.full(num_steps, -np.inf)
        np.maximum.at(ends, step, seconds)
        seconds = ends
    else:
        order = np.argsort(seconds, kind="stable")
        values, samples, seconds = values[order], samples[order], seconds[order]
    return (after or Curve()).extended(values, samples, seconds)


def complete_steps(rows: Records, num_ranks: int) -> NDArray[np.bool_]:
    """Return which rows are of the steps before the first that not every rank has reported."""
    if len(rows) == 0:
        return np.zeros(0, dtype=bool)
    _, step, counts = np.unique(rows["step"], return_inverse=True, return_counts=True)
    missing = np.flatnonzero(counts < num_ranks)
    complete: NDArray[np.bool_] = step < (missing[0] if len(missing) else len(counts))
    return complete


def with_waiting(rows: Records) -> Records:
    """Return synchronous steps with waiting taken out of communication.

    An exchange ends on all ranks together, so the one that comes last communicates least:

        waiting_i = communication_i - min over ranks j of communication_j, in the same step

    Where a strategy reports its waiting itself, nothing is changed.
    """
    if len(rows) == 0 or rows["waiting"].any() or not rows["communication"].any():
        return rows
    _, step = np.unique(rows["step"], return_inverse=True)
    least = np.full(int(step.max()) + 1, np.inf)
    np.minimum.at(least, step, rows["communication"])
    changed = rows.copy()
    changed["communication"] = least[step]
    changed["waiting"] = rows["communication"] - changed["communication"]
    return changed


def smoothed(curve: Curve) -> Floats:
    """Return the exponential moving average of a curve, without start-up bias.

    Its span is one update and a share of the samples so far, not of all that are planned.  So
    what is drawn stays, and a short and a long run reach the same loss at the same sample.
    Early, where the loss falls fast, the span is short, and the line does not lag behind its
    points: where the loss falls like ``1 / samples``, it is soon only a twentieth above them.

    A point ``d`` samples after the one before it weighs ``1 - exp(-d / span)``.  The sum is
    divided by the weights so far, as in Adam, so the first average is the first point.  NaN
    points stay NaN and leave the average as it is.
    """
    averages = np.full(len(curve), np.nan)
    if len(curve) == 0:
        return averages
    at = curve.samples if curve.samples[-1] > 0 else curve.updates  # a loop may log no samples
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
    """Return where the moving average of a curve ends; NaN before its first point."""
    known = [value for value in smoothed(curve).tolist() if math.isfinite(value)]
    return known[-1] if known else math.nan


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


def throughput(curve: Curve, window: float) -> tuple[Floats, Floats]:
    """Return seconds, and samples/s over the ``window`` seconds before each.

    Between updates, samples are interpolated linearly.  A run shorter than one window gives
    one point: its mean.
    """
    if len(curve) == 0 or curve.seconds[-1] <= 0:
        return np.empty(0), np.empty(0)
    end = float(curve.seconds[-1])
    window = min(window, end)
    at = np.linspace(window, end, THROUGHPUT_POINTS) if end > window else np.array([end])
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
