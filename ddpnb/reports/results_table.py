"""The table of results, one row per strategy (kernel)."""

import math
from collections.abc import Callable, Sequence

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.history.summary import Spread, StrategySummary, summarise
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.reports.formatting import NOTHING, labels, notes, number, percent, short, size, title
from ddpnb.reports.style import Style, style_of
from ddpnb.reports.table import Cell, Column, Table

RANGES = {
    "repeats": "samples/s: median and range over the repeats",
    "tenths": "samples/s: mean of the run, and range over its tenths",
}
"""The note that explains a range, by what the range is over."""


def results_table(comparison: Comparison, target: float | None = None) -> Table:
    """Return one row per strategy, without the columns that hold no information.

    Args:
        comparison: the runs.
        target: a training loss; a column shows when it was reached.  None: no such column.
    """
    summaries = summarise(comparison, target)
    names = labels(comparison)
    styles = [_style(summary, comparison) for summary in summaries]
    heads = tuple(
        Cell(
            text=names[s.comparison, s.name],
            quiet=_state(s),
            dot=style.colour,
            is_hollow=style.is_hollow,
        )
        for s, style in zip(summaries, styles, strict=True)
    )
    columns = [(Column(title="strategy"), heads)]
    is_classified = any(math.isfinite(s.held_out_accuracy.middle) for s in summaries)
    for name, cell_of in COLUMNS.items():
        cells = tuple(map(cell_of, summaries))
        is_redundant = is_classified and name == "held-out loss"  # still in to_frame()
        is_redundant |= name == "workers" and not _workers_differ(summaries)
        is_redundant |= name in ONLY_DIFFERENCES and len({cell.text for cell in cells}) == 1
        if not is_redundant and any(cell.text != NOTHING for cell in cells):
            columns.append((Column(title=name, is_number=True), cells))
        if name == "samples/s" and target is not None:
            reached = tuple(_reached(summary) for summary in summaries)
            columns.append((Column(title=f"to loss {target:g}", is_number=True), reached))
    return Table(
        caption=title(comparison),
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        notes=_column_notes(summaries, [column.title for column, _ in columns])
        + notes(comparison, summaries),
    )


def _workers_differ(summaries: Sequence[StrategySummary]) -> bool:
    """Return whether strategies other than the baseline differ in their number of workers."""
    return len({s.num_workers for s in summaries if s.num_workers and s.name != BASELINE}) > 1


def _column_notes(summaries: Sequence[StrategySummary], shown: Sequence[str]) -> tuple[str, ...]:
    overs = dict.fromkeys(s.samples_per_second.over for s in summaries)
    is_stale = any(math.isfinite(s.staleness_max) for s in summaries)
    found = [RANGES[over] for over in overs if over]
    found += ["staleness: median / maximum"] if is_stale else []
    if any(s.split.exposed_share > 0 for s in summaries):
        found.append(
            "exposed: share of a step in which a rank exchanges tensors or waits for other ranks, "
            "and computes nothing"
        )
    if "memory per rank" in shown:
        found.append("memory per rank: parameters and optimizer state, then the state alone")
    return tuple(found)


def _state(summary: StrategySummary) -> str:
    state = "" if summary.status is Status.FINISHED else summary.status.value
    repeats = f"{summary.num_runs} repeats" if summary.num_runs > 1 else ""
    return ", ".join(part for part in (repeats, state) if part)


def _style(summary: StrategySummary, comparison: Comparison) -> Style:
    several = list(dict.fromkeys(run.comparison for run in comparison.runs))
    shade = several.index(summary.comparison)
    return style_of(summary.name, comparison.strategies, shade)


def _speed(summary: StrategySummary) -> Cell:
    speed = summary.samples_per_second
    if math.isnan(speed.low):
        return Cell(text=number(speed.middle))
    return Cell(text=number(speed.middle), quiet=_range(speed, number))


def _speed_up(summary: StrategySummary) -> Cell:
    known = math.isfinite(summary.speed_up)
    return Cell(text=f"{summary.speed_up:.2f}×" if known else NOTHING)


def _of(spread: Spread, shown: Callable[[float], str] = number) -> Cell:
    if math.isnan(spread.low) or shown(spread.low) == shown(spread.high):
        return Cell(text=shown(spread.middle))
    return Cell(text=shown(spread.middle), quiet=_range(spread, shown))


def _range(spread: Spread, shown: Callable[[float], str]) -> str:
    """Return e.g. ``96.1–97.2 %``, with the unit once."""
    low, high = shown(spread.low), shown(spread.high)
    return f"{low.removesuffix(' %')}–{high}" if spread.low >= 0 else f"{low} to {high}"


def _exposed(summary: StrategySummary) -> Cell:
    parts = summary.split.parts
    is_timed = parts.communication + parts.waiting + parts.hidden > 0 or summary.name == CEILING
    is_known = is_timed and summary.num_workers > 1
    return Cell(text=percent(summary.split.exposed_share) if is_known else NOTHING)


def _memory(summary: StrategySummary) -> Cell:
    parameters, state = summary.parameter_bytes, summary.optimizer_bytes
    if math.isnan(parameters) and math.isnan(state):
        return Cell(text=NOTHING)
    both = sum(part for part in (parameters, state) if math.isfinite(part))
    return Cell(text=size(both), quiet=f"{size(state)} state" if state > 0 else "")


def _lost(summary: StrategySummary) -> Cell:
    return Cell(text=number(summary.num_lost_samples))


def _reached(summary: StrategySummary) -> Cell:
    """Return the seconds and samples after which the target was reached."""
    seconds, samples = summary.seconds_to_target.middle, summary.samples_to_target.middle
    if math.isnan(seconds):
        return Cell(text="never" if summary.status is Status.FINISHED else NOTHING)
    missed = f", {summary.num_missed_target} never" if summary.num_missed_target else ""
    return Cell(text=f"{number(seconds)} s", quiet=f"{short(samples)} samples{missed}")


def _staleness(summary: StrategySummary) -> Cell:
    if math.isnan(summary.staleness_max):
        return Cell(text=NOTHING)
    return Cell(text=f"{summary.staleness_median:g} / {summary.staleness_max:g}")


COLUMNS: dict[str, Callable[[StrategySummary], Cell]] = {
    "workers": lambda summary: Cell(text=str(summary.num_workers or NOTHING)),
    "samples/s": _speed,
    "speed-up": _speed_up,
    "efficiency": lambda summary: Cell(text=percent(summary.efficiency)),
    "of no-comm": lambda summary: Cell(text=percent(summary.share_of_ceiling)),
    "exposed": _exposed,
    "sent per step": lambda summary: Cell(text=size(summary.split.num_bytes_sent)),
    "final loss": lambda summary: _of(summary.final_loss),
    "held-out loss": lambda summary: _of(summary.held_out_loss),
    "held-out accuracy": lambda summary: _of(
        summary.held_out_accuracy, lambda share: percent(share, 1)
    ),
    "staleness": _staleness,
    "samples lost": _lost,
    "memory per rank": _memory,
}
"""The columns after the first, each with the function that fills its cells."""

ONLY_DIFFERENCES = ("memory per rank",)
"""Columns that are left out where all rows are the same."""
