"""The findings of a comparison as a table with one row per strategy.  Runs in the kernel."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ddpnb.protocol.catalogue import CEILING
from ddpnb.protocol.notation import Target
from ddpnb.reports.formatting import (
    NOTHING,
    learning_rates,
    listed,
    notes,
    number,
    percent,
    short,
    size,
    styles,
    title,
)
from ddpnb.reports.table import Cell, Column, Table
from ddpnb.results.comparison import Comparison
from ddpnb.results.model import Status
from ddpnb.results.summary import Spread, StrategySummary, summarise

MAX_SHARE_OF_CEILING = 1.05
"""If a strategy's share of the ceiling is above this, the table does not split its efficiency."""


def results_table(comparison: Comparison, target: Target | None = None) -> Table:
    """Return a table with one row per strategy, without columns that contain no information.

    Args:
        comparison: the comparison.
        target: if given, a column shows when each strategy reached this target.
    """
    summaries = summarise(comparison, target)
    look, rates = styles(comparison, summaries), learning_rates(comparison)

    def head_of(summary: StrategySummary) -> Cell:
        style, state = look[summary.key], _state(summary)
        hollow = style.is_hollow
        return Cell(text=summary.label, quiet=state, dot=style.colour, is_hollow=hollow)

    quantities = {
        "strategy": Quantity("how the ranks share the work: docs/strategies.md", head_of),
        "lr": Quantity("learning rate", lambda summary: Cell(text=rates.get(summary.key, NOTHING))),
        **quantities_of(summaries, target),
    }
    columns = {
        Column(title=name, about=quantity.about, is_number=name != "strategy"): cells
        for name, quantity in quantities.items()
        for cells in [tuple(map(quantity.cell_of, summaries))]
        if name == "strategy" or not _is_redundant(name, cells, summaries)
    }
    return Table(
        caption=title(comparison),
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        notes=_column_notes(summaries, [column.title for column in columns])
        + notes(comparison, summaries),
    )


def _is_redundant(name: str, cells: Sequence[Cell], summaries: Sequence[StrategySummary]) -> bool:
    """Return True if a column adds no information to the other columns."""
    match name:
        case "held-out loss" if any(math.isfinite(accuracy_of(s)) for s in summaries):
            return True  # to_frame() still has this column
        case "memory per rank" if len({cell.text for cell in cells}) == 1:
            return True
    return all(cell.text == NOTHING for cell in cells)


def _column_notes(summaries: Sequence[StrategySummary], shown: Sequence[str]) -> tuple[str, ...]:
    found = []
    rivals = [s for s in summaries if s.num_workers > 1 and not s.is_emulated]
    if quicker := [s.name for s in rivals if _outran_ceiling(s)]:
        found.append(
            f"no-comm was slower than {listed(quicker)}, so efficiency cannot be split into "
            "machine and communication. Possible causes: the machine was busy during no-comm "
            "(add --repeats), or the strategy does not wait for slow ranks"
        )
    if any(s.is_emulated for s in summaries):
        found.append(
            "numbers in brackets: emulated on CPU threads, so real speeds may be very different"
        )
    if "memory per rank" in shown:
        is_known = any(s.memory.activations for s in summaries)
        is_published = not is_known and any(s.is_computed for s in summaries)
        held = "memory per rank" + ", computed for the published model" * is_published
        rest = "and activations" if is_known else "(activations are not known)"
        parts = f"parameters, gradients, optimizer state {rest}"
        found.append(f"{held}: {parts}, on the rank that uses the most memory")
    return tuple(found)


def _state(summary: StrategySummary) -> str:
    return "" if summary.status is Status.FINISHED else summary.status.value


def _speed(summary: StrategySummary) -> Cell:
    speed = summary.samples_per_second
    middle = _judged(summary, number(speed.middle))
    return middle if math.isnan(speed.low) else replace(middle, quiet=_range(speed, number))


def _efficiency(summary: StrategySummary) -> Cell:
    """Return a cell with the efficiency, and below it the two factors machine × communication."""
    whole = _judged(summary, percent(summary.efficiency))
    unknown = math.isnan(summary.machine) or math.isnan(summary.share_of_ceiling)
    if unknown or _outran_ceiling(summary):
        return whole
    parts = percent(summary.machine), percent(summary.share_of_ceiling)
    return replace(whole, quiet=" × ".join(parts))


def _outran_ceiling(summary: StrategySummary) -> bool:
    """Return True if the strategy was faster than its ceiling ``no-comm``."""
    return summary.share_of_ceiling > MAX_SHARE_OF_CEILING


def _judged(summary: StrategySummary, text: str) -> Cell:
    """Return a cell with ``text``, in brackets if the strategy is emulated."""
    return Cell(text=f"({text})" if summary.is_emulated and text != NOTHING else text)


def _of(spread: Spread, shown: Callable[[float], str] = number) -> Cell:
    if math.isnan(spread.low) or shown(spread.low) == shown(spread.high):
        return Cell(text=shown(spread.middle))
    return Cell(text=shown(spread.middle), quiet=_range(spread, shown))


def _range(spread: Spread, shown: Callable[[float], str]) -> str:
    """Return a range with one unit, e.g. ``96.1–97.2 %``."""
    low, high = shown(spread.low), shown(spread.high)
    return f"{low.removesuffix(' %')}–{high}" if spread.low >= 0 else f"{low} to {high}"


def _exposed(summary: StrategySummary) -> Cell:
    parts = summary.split.parts
    is_timed = parts.communication + parts.waiting + parts.hidden > 0 or summary.name == CEILING
    is_known = is_timed and summary.num_workers > 1 and summary.sees_exposed
    return Cell(text=percent(summary.split.exposed_share) if is_known else NOTHING)


def _memory(summary: StrategySummary) -> Cell:
    memory = summary.memory
    if not memory.total:
        return Cell(text=NOTHING)
    return Cell(text=size(memory.total), quiet="peak" if memory.peak else "")


def _reached(summary: StrategySummary) -> Cell:
    """Return a cell with the time and the number of samples until a strategy reached the target."""
    seconds, samples = summary.seconds_to_target.middle, summary.samples_to_target.middle
    if summary.is_ceiling or math.isnan(seconds):
        return Cell(text=NOTHING)
    missed = summary.num_missed_target
    if math.isinf(seconds):
        of_all = f"in {missed} of {summary.num_runs}" if missed < summary.num_runs else ""
        return Cell(text="never", quiet=of_all)
    of_all = f"; {missed} of {summary.num_runs} repeats missed the target" if missed else ""
    return Cell(text=f"{number(seconds)} s", quiet=f"{short(samples)} samples{of_all}")


def _score(name: str, summary: StrategySummary) -> Cell:
    found = summary.scores.get(name, Spread())
    if name in summary.scores and name not in SCORES and math.isnan(found.middle):
        return Cell(text="NaN")  # the metric of the user's cell returned NaN
    return _of(found, partial(percent, decimals=1) if name == "held-out accuracy" else number)


def accuracy_of(summary: StrategySummary) -> float:
    """Return the median held-out accuracy of the repeats, or NaN if it is not known."""
    return summary.scores.get("held-out accuracy", Spread()).middle


def _speed_up(summary: StrategySummary) -> Cell:
    is_known = math.isfinite(summary.speed_up)
    return _judged(summary, f"{summary.speed_up:.2f}×" if is_known else NOTHING)


def _staleness(summary: StrategySummary) -> Cell:
    if math.isnan(summary.staleness_max):
        return Cell(text=NOTHING)
    return Cell(text=f"{summary.staleness_median:g} / {summary.staleness_max:g}")


class Quantity(NamedTuple):
    """A quantity that a column of the table shows for each strategy."""

    about: str
    """An explanation that appears when the pointer is on the column's title."""
    cell_of: Callable[[StrategySummary], Cell]


QUANTITIES: Mapping[str, Quantity] = {
    "samples/s": Quantity(
        "samples of all ranks, divided by the seconds of the slowest rank, without the warm-up. If "
        "there are several repeats: geometric mean and range",
        _speed,
    ),
    "speed-up": Quantity(
        "speed of the strategy, divided by the speed of single, which trains on one device",
        _speed_up,
    ),
    "efficiency": Quantity(
        "speed-up, divided by the number of devices. The two factors below it are machine (speed "
        "of no-comm / ideal speed) and communication (strategy's speed / speed of no-comm)",
        _efficiency,
    ),
    "exposed": Quantity("share of a step in which a rank only communicates or waits", _exposed),
    "sent per step": Quantity(
        "bytes that each worker sends", lambda s: Cell(text=size(s.split.num_bytes_sent))
    ),
    "staleness": Quantity(
        "number of updates by other workers between a worker's read and its update", _staleness
    ),
    "samples lost": Quantity(
        "number of samples that were not used, because a rank died before it returned a gradient",
        lambda s: Cell(text=number(s.num_lost_samples or math.nan)),
    ),
    "memory per rank": Quantity("memory of the rank that uses the most memory", _memory),
}


SCORES = {
    "final loss": "training loss at the end of the run (the end of the strong line)",
    "held-out loss": "mean loss on samples that are not used for training",
    "held-out accuracy": "share of held-out samples that are classified correctly",
}
"""Explanations of the scores that ddpnb computes.  A cell can define further scores."""


def quantities_of(
    summaries: Sequence[StrategySummary], target: Target | None = None
) -> Mapping[str, Quantity]:
    """Return the quantities that the table shows, by name: speeds, the target and all scores."""
    found = {"samples/s": QUANTITIES["samples/s"]}
    if target is not None:
        about = f"training time and number of samples until a run first reached {target.text}"
        found[f"to {target.text}"] = Quantity(about, _reached)
    found |= QUANTITIES
    for name in dict.fromkeys(name for summary in summaries for name in summary.scores):
        own = "metric at the end of the run" if name.startswith("last ") else "the cell's metric"
        found[name] = Quantity(SCORES.get(name, own), partial(_score, name))
    return found
