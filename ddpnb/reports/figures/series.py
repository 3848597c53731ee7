"""The lines and bars of a comparison as arrays (kernel).

Strong lines are the moving average of one run or the median of several repeats.  Faint ones are
every update of the run, or each repeat.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddpnb.history.aggregate import Curve, RankAggregate
from ddpnb.history.comparison import Comparison
from ddpnb.history.database import Floats
from ddpnb.history.metrics import (
    Absences,
    absences,
    samples_at,
    smoothed_loss,
    throughput,
    window_for,
)
from ddpnb.history.model import RunSnapshot
from ddpnb.history.summary import (
    StalenessCounts,
    StrategyKey,
    StrategySummary,
    group_runs,
    staleness_counts,
    summarise,
)
from ddpnb.reports.formatting import labels
from ddpnb.reports.style import Style, style_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMark:
    """A mark of a run, with its place in each panel."""

    rank: int
    text: str
    seconds: float
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One strategy in all panels."""

    label: str
    style: Style
    is_live: bool
    """Whether it is training now."""
    losses: Mapping[str, Line]
    """By the quantity on the x axis, one of ``plot_options.ACROSS``."""
    throughput: Line
    summary: StrategySummary
    ranks: tuple[RankAggregate, ...] = ()
    """Of the latest run."""
    away: Absences = field(default_factory=dict)
    """Of the latest run."""
    staleness: StalenessCounts
    marks: tuple[PlacedMark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRun:
    """One run, ready to be drawn."""

    curve: Curve
    samples: Floats
    """Samples seen up to each point, those of a resumed run included."""
    smoothed: Floats
    rate_seconds: Floats
    rate: Floats


@dataclass(slots=True)
class Preparer:
    """Prepares runs for drawing; a run that has not changed is prepared once."""

    _runs: dict[str, tuple[Hashable, PreparedRun]] = field(default_factory=dict)
    _series: dict[StrategyKey, tuple[Hashable, Series]] = field(default_factory=dict)

    def series_of(self, comparison: Comparison) -> tuple[Series, ...]:
        """Return one series per strategy and comparison."""
        names = labels(comparison)
        several = list(dict.fromkeys(key[0] for key in names))
        summaries = {(s.comparison, s.name): s for s in summarise(comparison)}
        return tuple(
            self._same(
                key,
                runs,
                summaries[key],
                names[key],
                style_of(key[1], comparison.strategies, several.index(key[0])),
            )
            for key, runs in group_runs(comparison.runs).items()
        )

    def run(self, run: RunSnapshot) -> PreparedRun:
        """Return a prepared run."""
        state = (run.aggregate.num_events, run.status)
        known = self._runs.get(run.run_id)
        if known is None or known[0] != state:
            known = (state, prepare(run))
            self._runs[run.run_id] = known
        return known[1]

    def _same(
        self,
        key: StrategyKey,
        runs: Sequence[RunSnapshot],
        summary: StrategySummary,
        label: str,
        style: Style,
    ) -> Series:
        """Return the last series if nothing in it has changed, else a new one."""
        progress = tuple((run.run_id, run.aggregate.num_events, run.status) for run in runs)
        compared_with = (str(summary.speed_up), str(summary.share_of_ceiling))
        num_marks = sum(len(run.marks) for run in runs)
        state = (progress, compared_with, num_marks, label, style)
        known = self._series.get(key)
        if known is None or known[0] != state:
            made = _series(label, style, runs, list(map(self.run, runs)), summary)
            known = (state, made)
            self._series[key] = known
        return known[1]


def series_of(comparison: Comparison) -> tuple[Series, ...]:
    """Return one series per strategy and comparison."""
    return Preparer().series_of(comparison)


def prepare(run: RunSnapshot) -> PreparedRun:
    """Return the smoothed curves of one run."""
    curve = run.aggregate.curve
    seconds, rate = _throughput(curve, run.header.num_samples if run.header else 0)
    return PreparedRun(
        curve=curve,
        samples=curve.samples + run.num_samples_before,
        smoothed=smoothed_loss(run),
        rate_seconds=seconds,
        rate=rate,
    )


def _throughput(curve: Curve, planned: float) -> tuple[Floats, Floats]:
    """Return the throughput, over a window that depends on the planned duration of the run.

    The window spans several updates, as two workers can update at almost the same time.
    """
    if len(curve) == 0 or curve.samples[-1] == 0:
        return np.empty(0), np.empty(0)
    seconds = float(curve.seconds[-1]) * max(planned / float(curve.samples[-1]), 1.0)
    gap = float(curve.seconds[-1]) / curve.num_updates
    return throughput(curve, max(window_for(seconds), window_for(12 * UPDATES_IN_WINDOW * gap)))


def _series(
    label: str,
    style: Style,
    runs: Sequence[RunSnapshot],
    drawn: Sequence[PreparedRun],
    summary: StrategySummary,
) -> Series:
    timed = [run for run in drawn if len(run.curve)]
    sampled = [run for run in timed if run.curve.samples[-1] > 0]
    rates = [(run.rate_seconds, run.rate) for run in drawn if len(run.rate)]
    return Series(
        label=label,
        style=style,
        is_live=any(run.is_running for run in runs),
        losses={
            "samples": _loss(sampled, lambda run: run.samples),
            "seconds": _loss(timed, lambda run: run.curve.seconds),
            "updates": _loss(timed, lambda run: run.curve.updates),
        },
        throughput=_line(rates, []),
        summary=summary,
        ranks=runs[-1].aggregate.ranks,
        away=absences(runs[-1]),
        staleness=staleness_counts(runs),
        marks=tuple(
            PlacedMark(
                rank=mark.rank,
                text=mark.text,
                seconds=mark.seconds,
                samples=run.num_samples_before
                + float(samples_at(run.aggregate.curve, np.array([mark.seconds]))[0]),
            )
            for run in runs
            for mark in run.marks
        ),
    )


def _loss(runs: Sequence[PreparedRun], across: Callable[[PreparedRun], Floats]) -> Line:
    line = _line(
        [(across(run), run.smoothed) for run in runs],
        [_raw(across(run), run.curve) for run in runs],
    )
    bad = [across(run)[run.curve.num_bad > 0] for run in runs]
    return Line(
        x=line.x,
        y=line.y,
        faint_x=line.faint_x,
        faint_y=line.faint_y,
        bad_x=np.concatenate(bad) if bad else np.empty(0),
    )


def _raw(x: Floats, curve: Curve) -> tuple[Floats, Floats]:
    """Return a line through the lowest and the highest loss of each point."""
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
    known &= ~np.isnan(values).all(axis=0)
    return grid[known], np.nanmedian(values[:, known], axis=0)
