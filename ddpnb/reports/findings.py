"""The findings of a comparison as a table with one row per strategy.  Runs in the kernel."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ddpnb.protocol.notation import Target
from ddpnb.reports.formatting import (
    NOTHING,
    listed,
    notes,
    number,
    percent,
    plain,
    short,
    size,
    styles,
    title,
)
from ddpnb.reports.table import Cell, Column, Table
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import SCORES, Row, is_score
from ddpnb.results.run import Status

MAX_SHARE_OF_CEILING = 1.05
"""If a strategy's share of the ceiling is above this, the table does not split its efficiency."""


def results_table(
    comparison: Comparison, strategies: Sequence[Row], target: Target | None = None
) -> Table:
    """Return a table with one row per strategy, without columns that contain no information.

    Args:
        comparison: the comparison.
        strategies: the rows of ``strategies_frame``.
        target: if given, a column shows when each strategy reached this target.
    """
    heads = [
        Cell(
            text=row["label"],
            quiet="" if row["status"] == Status.FINISHED.value else row["status"],
            dot=style.colour,
            is_hollow=style.is_hollow,
        )
        for row, style in zip(strategies, styles(comparison, strategies), strict=True)
    ]
    about = "how the ranks share the work: docs/strategies.md"
    columns = {Column(title="strategy", about=about): tuple(heads)}
    for quantity in quantities_of(strategies, target):
        cells = tuple(map(quantity.cell_of, strategies))
        if not _is_redundant(quantity.title, cells, strategies):
            columns[Column(title=quantity.title, about=quantity.about, is_number=True)] = cells
    return Table(
        caption=title(comparison),
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        notes=_column_notes(strategies, [column.title for column in columns])
        + notes(comparison, strategies),
    )


def _is_redundant(title: str, cells: Sequence[Cell], strategies: Sequence[Row]) -> bool:
    """Return True if a column adds no information to the other columns."""
    match title:
        case "held-out loss" if any(math.isfinite(row["held_out_accuracy"]) for row in strategies):
            return True  # strategies() still has this column
        case "memory per rank" if len({cell.text for cell in cells}) == 1:
            return True
        case "lr" if len({cell.text for cell in cells} - {NOTHING}) == 1:
            return not any(row["is_tuned"] for row in strategies)
    return all(cell.text == NOTHING for cell in cells)


def _column_notes(strategies: Sequence[Row], shown: Sequence[str]) -> tuple[str, ...]:
    found = []
    rivals = [row for row in strategies if row["num_workers"] > 1 and not row["is_emulated"]]
    if quicker := [row["strategy"] for row in rivals if _outran_ceiling(row)]:
        found.append(
            f"no-comm was slower than {listed(quicker)}, so efficiency cannot be split into "
            "machine and communication. Possible causes: the machine was busy during no-comm "
            "(add --repeats), or the strategy does not wait for slow ranks"
        )
    if any(row["is_emulated"] for row in strategies):
        found.append(
            "numbers in brackets: emulated on CPU threads, so real speeds may be very different"
        )
    if "memory per rank" in shown:
        is_known = any(row["memory_activations"] for row in strategies)
        is_published = not is_known and any(row["is_computed"] for row in strategies)
        held = "memory per rank" + ", computed for the published model" * is_published
        rest = "and activations" if is_known else "(activations are not known)"
        parts = f"parameters, gradients, optimizer state {rest}"
        found.append(f"{held}: {parts}, on the rank that uses the most memory")
    return tuple(found)


def _outran_ceiling(row: Row) -> bool:
    """Return True if the strategy was faster than its ceiling ``no-comm``."""
    return bool(row["communication"] > MAX_SHARE_OF_CEILING)


# -- cells -----------------------------------------------------------------------------------


class Quantity(NamedTuple):
    """A quantity that a column of the table shows for each strategy."""

    title: str
    about: str
    """An explanation that appears when the pointer is on the column's title."""
    cell_of: Callable[[Row], Cell]


def quantities_of(strategies: Sequence[Row], target: Target | None = None) -> list[Quantity]:
    """Return the quantities that the table shows: speeds, the target and all scores."""
    rate, speed, *others = QUANTITIES
    found = [rate, speed]
    if target is not None:
        about = f"training time and number of samples until a run first reached {target.text}"
        found.append(Quantity(f"to {target.text}", about, _reached))
    found += others
    for name in dict.fromkeys(key for row in strategies for key in row if is_score(key)):
        if any(f"{name}_low" in row for row in strategies):  # otherwise the end of a range
            own = (
                "metric at the end of the run" if name.startswith("last_") else "the cell's metric"
            )
            cell_of = partial(_score, name)
            found.append(Quantity(score_title(name), SCORE_ABOUTS.get(name, own), cell_of))
    return found


def score_title(column: str) -> str:
    """Return the title of a score's column, such as ``held-out accuracy``."""
    if column in SCORES:
        return column.replace("held_out", "held-out").replace("_", " ")
    return column.replace("held_out_", "held-out ", 1).replace("last_", "last ", 1)


def _spread(
    name: str, row: Row, shown: Callable[[float], str] = number, *, in_brackets: bool = False
) -> Cell:
    """Return a cell with a value, and with its range over repeats, e.g. ``96.1–97.2 %``."""
    text, low, high = (shown(row.get(name + end, math.nan)) for end in ("", "_low", "_high"))
    text = f"({text})" if in_brackets and text != NOTHING else text
    if NOTHING in (low, high) or low == high:
        return Cell(text=text)
    is_positive = row[f"{name}_low"] >= 0
    return Cell(
        text=text, quiet=f"{low.removesuffix(' %')}–{high}" if is_positive else f"{low} to {high}"
    )


def _judged(row: Row, text: str, quiet: str = "") -> Cell:
    """Return a cell with ``text``, in brackets if the strategy is emulated."""
    text = f"({text})" if row["is_emulated"] and text != NOTHING else text
    return Cell(text=text, quiet=quiet)


def _efficiency(row: Row) -> Cell:
    """Return a cell with the efficiency, and below it the two factors machine × communication."""
    parts = row["machine"], row["communication"]
    is_split = all(map(math.isfinite, parts)) and not _outran_ceiling(row)
    return _judged(row, percent(row["efficiency"]), " × ".join(map(percent, parts)) * is_split)


def _exposed(row: Row) -> Cell:
    return Cell(text=percent(row["exposed"]) if row["num_workers"] > 1 else NOTHING)


def _memory(row: Row) -> Cell:
    if not row["memory_total"]:
        return Cell(text=NOTHING)
    return Cell(text=size(row["memory_total"]), quiet="peak" if row["memory_peak"] else "")


def _reached(row: Row) -> Cell:
    """Return a cell with the time and the number of samples until a strategy reached the target."""
    seconds, samples = row["seconds_to_target"], row["samples_to_target"]
    if row["is_ceiling"] or math.isnan(seconds):
        return Cell(text=NOTHING)
    missed, num_runs = row["num_missed_target"], row["num_runs"]
    if math.isinf(seconds):
        return Cell(text="never", quiet=f"in {missed} of {num_runs}" if missed < num_runs else "")
    of_all = f"; {missed} of {num_runs} repeats missed the target" if missed else ""
    return Cell(text=f"{number(seconds)} s", quiet=f"{short(samples)} samples{of_all}")


def _score(name: str, row: Row) -> Cell:
    if name in row and name not in SCORES and math.isnan(row[name]):
        return Cell(text="NaN")  # the metric of the user's cell returned NaN
    shown = partial(percent, decimals=1) if name == "held_out_accuracy" else number
    return _spread(name, row, shown)


def _staleness(row: Row) -> Cell:
    if math.isnan(row["staleness_max"]):
        return Cell(text=NOTHING)
    return Cell(text=f"{row['staleness_median']:g} / {row['staleness_max']:g}")


def _speed_up(row: Row) -> Cell:
    speed_up = row["speed_up"]
    return _judged(row, f"{speed_up:.2f}×" if math.isfinite(speed_up) else NOTHING)


QUANTITIES: Sequence[Quantity] = (
    Quantity(
        "lr",
        "learning rate",
        lambda row: Cell(text=NOTHING if row["is_ceiling"] else plain(row["learning_rate"])),
    ),
    Quantity(
        "samples/s",
        "samples of all ranks, divided by the seconds of the slowest rank, without the warm-up. If "
        "there are several repeats: geometric mean and range",
        lambda row: _spread("samples_per_second", row, in_brackets=row["is_emulated"]),
    ),
    Quantity(
        "speed-up",
        "speed of the strategy, divided by the speed of single, which trains on one device. Only "
        "repeats that both finished count",
        _speed_up,
    ),
    Quantity(
        "efficiency",
        "speed-up, divided by the number of devices. The two factors below it are machine (speed "
        "of no-comm / ideal speed) and communication (strategy's speed / speed of no-comm)",
        _efficiency,
    ),
    Quantity("exposed", "share of a step in which a rank only communicates or waits", _exposed),
    Quantity(
        "sent per step",
        "bytes that each worker sends",
        lambda row: Cell(text=size(row["bytes_sent_per_step"])),
    ),
    Quantity(
        "staleness",
        "number of updates by other workers between a worker's read and its update",
        _staleness,
    ),
    Quantity(
        "samples lost",
        "number of samples that were not used, because a rank died before it returned a gradient",
        lambda row: Cell(text=number(row["num_lost_samples"] or math.nan)),
    ),
    Quantity("memory per rank", "memory of the rank that uses the most memory", _memory),
)

SCORE_ABOUTS: Mapping[str, str] = {
    "final_loss": "training loss at the end of the run (the end of the strong line)",
    "held_out_loss": "mean loss on samples that are not used for training",
    "held_out_accuracy": "share of held-out samples that are classified correctly",
}
"""Explanations of the scores that ddpnb computes.  A cell can define further scores."""
