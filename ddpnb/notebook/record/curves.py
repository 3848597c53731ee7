"""How does a run's loss fall, and how fast do samples go by?  (Notebook side.)

Pure arithmetic on a snapshot; nothing is drawn here.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpnb.notebook.record.events import Records
from ddpnb.notebook.record.runs import RunSnapshot

Floats = NDArray[np.float64]

MAX_POINTS = 500
"""No curve is drawn with more points than this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """The updates of a run in order, all workers together; arrays of equal length."""

    samples: Floats
    """Samples seen by all workers together, this update included."""
    seconds: Floats
    """Training seconds at the end of the update; never falls."""
    loss: Floats
    """Mean loss over the update's samples; NaN or infinite where training diverged."""
    weight: Floats
    """Samples of this update alone."""

    def __len__(self) -> int:
        return len(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A run thinned for drawing; each point stands for ``num_merged`` updates."""

    samples: Floats
    seconds: Floats
    loss: Floats
    """Mean over the merged updates that are finite; NaN if none is."""
    lowest: Floats
    highest: Floats
    num_merged: int = 1

    def __len__(self) -> int:
        return len(self.loss)


def steps_of(run: RunSnapshot) -> Steps:
    """Return the updates of ``run`` in order.

    Synchronous workers make step k together: one update, its loss the mean
    weighted by samples, its time that of the slowest; steps that not every worker
    has told yet are held back while the run goes on.  Asynchronous and logged
    steps are each an update of their own, ordered by time.
    """
    if run.header is not None and run.header.synchronous:
        return _synchronous(run.events, _num_tellers(run) if run.is_running else 0)
    order = np.argsort(run.events["seconds"], kind="stable")
    rows = run.events[order]
    weight = rows["num_samples"].astype(np.float64)
    return _in_order(rows["seconds"].astype(np.float64), rows["loss"].astype(np.float64), weight)


def thin(steps: Steps, max_points: int = MAX_POINTS) -> Curve:
    """Merge neighbouring updates so that at most ``max_points`` remain.

    The number merged is a power of two: while a run grows, points already drawn
    stay where they are.  A merged point sits at the end of its updates.
    """
    num_merged = 1
    while math.ceil(len(steps) / num_merged) > max_points:
        num_merged *= 2
    if len(steps) == 0 or num_merged == 1:
        loss = np.where(np.isfinite(steps.loss), steps.loss, np.nan)
        return Curve(
            samples=steps.samples, seconds=steps.seconds, loss=loss, lowest=loss, highest=loss
        )
    starts = np.arange(0, len(steps), num_merged)
    ends = np.append(starts[1:], len(steps)) - 1
    lowest, highest = _extremes(steps.loss, starts)
    return Curve(
        samples=steps.samples[ends],
        seconds=steps.seconds[ends],
        loss=_weighted_means(steps, starts),
        lowest=lowest,
        highest=highest,
        num_merged=num_merged,
    )


def smooth(loss: Floats, samples: Floats, span: float) -> Floats:
    """Return the exponential moving average over ``span`` samples, without start-up bias.

    A point ``d`` samples after the one before it weighs ``1 - exp(-d / span)``; the
    sum is divided by the weights so far (as Adam does), so the first point is
    itself.  NaN points stay NaN and leave the average as it is.
    """
    if span <= 0:
        return loss
    smoothed = np.full(len(loss), np.nan)
    total = weight = previous = 0.0
    for index, (value, position) in enumerate(zip(loss.tolist(), samples.tolist(), strict=True)):
        share = 1.0 - math.exp(-max(position - previous, 0.0) / span)
        previous = position
        if math.isfinite(value) and share > 0:
            total += share * (value - total)
            weight += share * (1.0 - weight)
            smoothed[index] = total / weight
    return smoothed


def throughput(steps: Steps, window: float, max_points: int = 160) -> tuple[Floats, Floats]:
    """Return seconds, and samples/s over the ``window`` seconds before each.

    Between updates the samples count as seen evenly.  A run shorter than one
    window gives one point: its mean.
    """
    if len(steps) == 0 or steps.seconds[-1] <= 0:
        return np.empty(0), np.empty(0)
    end = float(steps.seconds[-1])
    window = min(window, end)
    at = np.linspace(window, end, max_points) if end > window else np.array([end])
    return at, (_samples_at(steps, at) - _samples_at(steps, at - window)) / window


def window_for(seconds: float) -> float:
    """Return a round window, about a twelfth of ``seconds``, that seldom changes."""
    target = max(seconds, 1e-3) / 12
    unit = 10.0 ** math.floor(math.log10(target))
    return unit * max(step for step in (1.0, 2.0, 5.0) if step * unit <= target * (1 + 1e-9))


def tenths(steps: Steps) -> Floats:
    """Return samples/s in each tenth of the run's samples; empty below ten updates."""
    if len(steps) < 10 or steps.samples[-1] <= 0 or steps.seconds[-1] <= 0:
        return np.empty(0)
    marks = np.linspace(0.0, steps.samples[-1], 11)
    reached = np.interp(marks, np.append(0.0, steps.samples), np.append(0.0, steps.seconds))
    lasted = np.diff(reached)
    rates: Floats = (steps.samples[-1] / 10) / lasted[lasted > 0]
    return rates


def num_diverged(run: RunSnapshot) -> int:
    """Return how many losses are infinite, or NaN although others were logged."""
    loss = run.events["loss"]
    bad = int(np.count_nonzero(~np.isfinite(loss)))
    never_logged = run.spec is None and bool(np.isnan(loss).all())
    return 0 if never_logged else bad


def _num_tellers(run: RunSnapshot) -> int:
    """Return how many ranks tell of each step of a synchronous run that has begun.

    A process that drives several replicas (``dp``) tells of whole batches; it is
    known by a first step larger than one worker's share.
    """
    assert run.header is not None
    ranks = run.events["rank"]
    if len(ranks) == 0 or run.spec is None or ranks.min() != ranks.max():
        return run.header.num_workers
    largest_share = math.ceil(run.spec.batch_size / run.header.num_workers)
    return 1 if run.events["num_samples"][0] > largest_share else run.header.num_workers


def _synchronous(events: Records, num_tellers: int) -> Steps:
    """Join the workers' shares of each step, up to the first that fewer than all have told."""
    counts = np.bincount(events["step"])
    incomplete = counts < num_tellers
    kept = int(np.argmax(incomplete)) if incomplete.any() else len(counts)
    rows = events[events["step"] < kept]
    samples = rows["num_samples"].astype(np.float64)
    weight: Floats = np.bincount(rows["step"], samples, kept).astype(np.float64)
    weighted = np.where(samples > 0, rows["loss"], 0.0) * samples
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = np.bincount(rows["step"], weighted, kept) / weight
    seconds = np.zeros(kept)
    np.maximum.at(seconds, rows["step"], rows["seconds"])
    return _in_order(seconds, loss, weight)


def _in_order(seconds: Floats, loss: Floats, weight: Floats) -> Steps:
    return Steps(
        samples=np.cumsum(weight),
        seconds=np.maximum.accumulate(seconds) if len(seconds) else seconds,
        loss=loss,
        weight=weight,
    )


def _weighted_means(steps: Steps, starts: NDArray[np.int64]) -> Floats:
    finite = np.isfinite(steps.loss)
    weight = steps.weight if steps.weight.any() else np.ones(len(steps))
    weight = np.where(finite, weight, 0.0)
    total = np.add.reduceat(np.where(finite, steps.loss, 0.0) * weight, starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / np.add.reduceat(weight, starts))


def _extremes(loss: Floats, starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    finite = np.isfinite(loss)
    lowest = np.minimum.reduceat(np.where(finite, loss, np.inf), starts)
    highest = np.maximum.reduceat(np.where(finite, loss, -np.inf), starts)
    empty = ~np.isfinite(lowest)
    lowest[empty] = highest[empty] = np.nan
    return lowest, highest


def _samples_at(steps: Steps, seconds: Floats) -> Floats:
    samples: Floats = np.interp(
        seconds, np.append(0.0, steps.seconds), np.append(0.0, steps.samples)
    )
    return samples
