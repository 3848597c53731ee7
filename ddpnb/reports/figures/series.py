"""The lines and bars of a comparison as arrays (kernel).

Strong lines are the moving average of one run or the median of several repeats.  Faint ones are
every update of the run, or each repeat.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ddpnb.history.comparison import Comparison
from ddpnb.history.curve import Curve, samples_at, smoothed, throughput, window_for
from ddpnb.history.model import Absences, RankTotals, RunSnapshot, absences
from ddpnb.history.rows import Floats
from ddpnb.history.summary import (
    StalenessCounts,
    StrategySummary,
    evaluations,
    group_runs,
    staleness_counts,
    summarise,
)
from ddpnb.protocol.messages import Mark
from ddpnb.protocol.notation import Target
from ddpnb.reports.formatting import labels, styles
from ddpnb.reports.style import Style

UPDATES_IN_WINDOW = 10
"""About the least number of updates in a window of throughput."""

GRID_POINTS = 240
"""Number of points of the median of repeats."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """One strategy in one panel."""

    x: Floats
    y: Floats
    faint_x: Floats
    faint_y: Floats
    bad_x: Floats = field(default_factory=lambda: np.empty(0))
    """The points with NaN or infinite losses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One strategy in all panels."""

    label: str
    style: Style
    losses: Mapping[str, Line]
    """By the quantity on the x axis, one of ``style.ACROSS``."""
    throughput: Line
    held_out: Mapping[tuple[str, str], Line]
    """By what is measured, ``"loss"`` or ``"accuracy"``, and the quantity on the x axis,
    ``"samples"`` or ``"seconds"``."""
    summary: StrategySummary
    ranks: tuple[RankTotals, ...] = ()
    """Of the latest run."""
    away: Absences = field(default_factory=dict)
    """Of the latest run."""
    staleness: StalenessCounts
    marks: tuple[tuple[Mark, float], ...] = ()
    """Each with the samples seen until then."""


def series_of(
    comparison: Comparison, y: str = "", target: Target | None = None
) -> tuple[Series, ...]:
    """Return one series per strategy and comparison.

    Args:
        comparison: the runs.
        y: the further number whose curve is drawn; empty: the loss.
        target: of the summaries.
    """
    names, look = labels(comparison), styles(comparison)
    summaries = {(s.comparison, s.name): s for s in summarise(comparison, target)}
    return tuple(
        _series(names[key], look[key], runs, summaries[key], y)
        for key, runs in group_runs(comparison.runs).items()
    )


def _throughput(run: RunSnapshot) -> tuple[Floats, Floats]:
    """Return the throughput, over a window that depends on the run's duration, or the planned one.

    It is at most a third of what has passed, so that a long run has a curve from its beginning.  It
    spans several updates, as two workers can update at almost the same time.
    """
    curve, planned = run.curve, run.header.num_samples if run.header and run.is_running else 0
    if len(curve) == 0 or curve.samples[-1] == 0:
        return np.empty(0), np.empty(0)
    passed = float(curve.seconds[-1])
    seconds = passed * min(max(planned / float(curve.samples[-1]), 1.0), 4.0)  # window: a twelfth
    gap = passed / curve.num_updates
    return throughput(curve, max(window_for(seconds), window_for(12 * UPDATES_IN_WINDOW * gap)))


def _series(
    label: str, style: Style, runs: Sequence[RunSnapshot], summary: StrategySummary, y: str
) -> Series:
    drawn = [run.metric_curves.get(y, Curve()) if y else run.curve for run in runs]
    timed = [curve for curve in drawn if len(curve)]
    if summary.is_ceiling:  # trained for its rate: its loss is no rival
        timed = []
    sampled = [curve for curve in timed if curve.samples[-1] > 0]
    rates = [rate for rate in map(_throughput, runs) if len(rate[1])]
    return Series(
        label=label,
        style=style,
        losses={
            "samples": _loss(sampled, lambda curve: curve.samples),
            "seconds": _loss(timed, lambda curve: curve.seconds),
            "updates": _loss(timed, lambda curve: curve.updates),
        },
        throughput=_line(rates, []),
        held_out={
            (y, x): _point_by_point(_held_out(runs, y, x))
            for y in ("loss", "accuracy")
            for x in ("samples", "seconds")
        },
        summary=summary,
        ranks=runs[-1].ranks,
        away=absences(runs[-1]),
        staleness=staleness_counts(runs),
        marks=tuple(
            (mark, float(samples_at(run.curve, np.array([mark.seconds]))[0]))
            for run in runs
            for mark in run.marks
        ),
    )


def _held_out(runs: Sequence[RunSnapshot], y: str, x: str) -> list[tuple[Floats, Floats]]:
    """Return the held-out curve of each run that has one."""
    across = {"samples": "num_samples", "seconds": "seconds"}[x]
    points = [[(getattr(e, across), getattr(e, y)) for e in evaluations(run)] for run in runs]
    lines = [(each[:, 0], each[:, 1]) for each in (np.array(found) for found in points if found)]
    return [line for line in lines if np.isfinite(line[1]).any()]


def _point_by_point(lines: list[tuple[Floats, Floats]]) -> Line:
    """Return curves of few points with their medians, the first point's with the first one's."""
    line = _line(lines, [])
    if len(lines) < 2 or len({len(x) for x, _ in lines}) > 1:
        return line
    x, y = (np.median(np.array(each), axis=0) for each in zip(*lines, strict=True))
    return replace(line, x=x, y=y)


def _loss(curves: Sequence[Curve], across: Callable[[Curve], Floats]) -> Line:
    raw = [  # lines through the lowest and the highest value of each point
        (np.repeat(across(curve), 2), np.column_stack([curve.lowest, curve.highest]).ravel())
        for curve in curves
    ]
    line = _line([(across(curve), smoothed(curve)) for curve in curves], raw)
    bad = [across(curve)[curve.num_bad > 0] for curve in curves]
    return replace(line, bad_x=np.concatenate([np.empty(0), *bad]))


def _line(strong: list[tuple[Floats, Floats]], raw: list[tuple[Floats, Floats]]) -> Line:
    faint_x, faint_y = _joined(strong if len(strong) > 1 else raw)
    x, y = strong[0] if len(strong) == 1 else _median(strong)
    return Line(x=x, y=y, faint_x=faint_x, faint_y=faint_y)


def _joined(lines: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return several lines as one, with gaps between them."""
    xs, ys = [np.empty(0)], [np.empty(0)]
    for x, y in lines:
        xs += [x, np.array([np.nan])]
        ys += [y, np.array([np.nan])]
    return np.concatenate(xs), np.concatenate(ys)


def _median(lines: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return the median at each x that at least half of the lines have reached."""
    if not lines:
        return np.empty(0), np.empty(0)
    first = min(float(x[0]) for x, _ in lines)
    last = max(float(x[-1]) for x, _ in lines)
    grid = np.linspace(first, last, GRID_POINTS)
    values = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in lines])
    known = 2 * np.count_nonzero(~np.isnan(values), axis=0) >= len(lines)
    known &= ~np.isnan(values).all(axis=0)
    return grid[known], np.nanmedian(values[:, known], axis=0)
