"""Which lines does a comparison draw?  (Notebook side.)

Pure: from a snapshot to arrays.  Strong is the moving average of one run, or the
median of several repeats; faint is every update of the one run, or each repeat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddpnb.notebook.record.comparison import Comparison
from ddpnb.notebook.record.curves import (
    Curve,
    Floats,
    Steps,
    smooth,
    steps_of,
    thin,
    throughput,
    window_for,
)
from ddpnb.notebook.record.runs import RunSnapshot
from ddpnb.notebook.record.summary import group_runs, samples_per_second, spread
from ddpnb.notebook.show.theme import Style, style_of
from ddpnb.notebook.show.words import labels

SMOOTHED_SHARE = 0.025
"""The moving average spans this share of the run's samples."""

UPDATES_IN_WINDOW = 10
"""About the fewest updates that throughput is taken over."""

GRID_POINTS = 240
"""Points at which the median of repeats is taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """One strategy in one panel."""

    x: Floats
    y: Floats
    faint_x: Floats
    faint_y: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One strategy in all panels."""

    label: str
    style: Style
    by_samples: Line
    by_seconds: Line
    throughput: Line
    samples_per_second: float
    """Median over the repeats."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """One run, ready to be drawn; costly, so kept while nothing new has come."""

    curve: Curve
    smoothed: Floats
    rate_seconds: Floats
    rate: Floats
    samples_per_second: float


def series_of(
    comparison: Comparison, drawn: Callable[[RunSnapshot], Drawn] | None = None
) -> tuple[Series, ...]:
    """Return what to draw, one per strategy and comparison.

    Args:
        comparison: the snapshot to draw.
        drawn: how to prepare one run; ``prepare`` unless a figure keeps what it has.
    """
    names = labels(comparison)
    several = list(dict.fromkeys(key[0] for key in names))
    return tuple(
        _series(
            names[key],
            style_of(key[1], comparison.strategies, several.index(key[0])),
            list(map(drawn or prepare, runs)),
        )
        for key, runs in group_runs(comparison.runs).items()
    )


def prepare(run: RunSnapshot) -> Drawn:
    """Return the thinned and smoothed curves of one run."""
    steps = steps_of(run)
    curve = thin(steps)
    seconds, rate = _throughput(steps, _planned(run))
    return Drawn(
        curve=curve,
        smoothed=_smoothed(curve, run),
        rate_seconds=seconds,
        rate=rate,
        samples_per_second=samples_per_second(run),
    )


def _throughput(steps: Steps, planned: float) -> tuple[Floats, Floats]:
    """Take the window from how long the run will last, so that no line wavers.

    It spans several updates: two workers' updates can come at almost the same time.
    """
    if len(steps) == 0 or steps.samples[-1] == 0:
        return np.empty(0), np.empty(0)
    seconds = float(steps.seconds[-1]) * max(planned / float(steps.samples[-1]), 1.0)
    gap = float(steps.seconds[-1]) / len(steps)
    return throughput(steps, max(window_for(seconds), window_for(12 * UPDATES_IN_WINDOW * gap)))


def _smoothed(curve: Curve, run: RunSnapshot) -> Floats:
    """Average over a share of the whole run, known beforehand, so that no line wavers."""
    if len(curve) == 0:
        return curve.loss
    if curve.samples[-1] == 0:  # a hand-written loop that logs no samples
        index = np.arange(1.0, len(curve) + 1)
        return smooth(curve.loss, index, SMOOTHED_SHARE * len(curve))
    span = SMOOTHED_SHARE * max(_planned(run), float(curve.samples[-1]))
    return smooth(curve.loss, curve.samples, span)


def _planned(run: RunSnapshot) -> int:
    return run.header.num_samples if run.header else 0


def _series(label: str, style: Style, runs: Sequence[Drawn]) -> Series:
    sampled = [run for run in runs if len(run.curve) and run.curve.samples[-1] > 0]
    timed = [run for run in runs if len(run.curve)]
    by_samples = [(run.curve.samples, run.smoothed) for run in sampled]
    by_seconds = [(run.curve.seconds, run.smoothed) for run in timed]
    rates = [(run.rate_seconds, run.rate) for run in runs if len(run.rate)]
    return Series(
        label=label,
        style=style,
        by_samples=_line(by_samples, [_raw(r.curve.samples, r.curve) for r in sampled]),
        by_seconds=_line(by_seconds, [_raw(r.curve.seconds, r.curve) for r in timed]),
        throughput=_line(rates, []),
        samples_per_second=spread([run.samples_per_second for run in runs]).middle,
    )


def _raw(x: Floats, curve: Curve) -> tuple[Floats, Floats]:
    """Return a line through the lowest and highest update that each point stands for."""
    if curve.num_merged == 1:
        return x, curve.loss
    return np.repeat(x, 2), np.column_stack([curve.lowest, curve.highest]).ravel()


def _line(strong: list[tuple[Floats, Floats]], raw: list[tuple[Floats, Floats]]) -> Line:
    faint_x, faint_y = _joined(strong if len(strong) > 1 else raw)
    x, y = strong[0] if len(strong) == 1 else _median(strong)
    return Line(x=x, y=y, faint_x=faint_x, faint_y=faint_y)


def _joined(lines: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return several lines as one, with gaps between them."""
    if not lines:
        return np.empty(0), np.empty(0)
    gap = np.array([np.nan])
    return (
        np.concatenate([part for x, _ in lines for part in (x, gap)]),
        np.concatenate([part for _, y in lines for part in (y, gap)]),
    )


def _median(lines: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return the median at each x that at least half of the lines have reached."""
    if not lines:
        return np.empty(0), np.empty(0)
    first = min(float(x[0]) for x, _ in lines)
    last = max(float(x[-1]) for x, _ in lines)
    grid = np.linspace(first, last, GRID_POINTS)
    values = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in lines])
    known = 2 * np.count_nonzero(~np.isnan(values), axis=0) >= len(lines)
    return grid[known], np.nanmedian(values[:, known], axis=0)
