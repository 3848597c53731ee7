"""What asynchronous workers read and write: versions, staleness, the bound (kernel).

Pure functions of a run's steps.  The server reports with each gradient which version it has made
and how stale the gradient was, so which version it was computed with is known too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import Update
from ddpnb.protocol.messages import Mark, MarkKind
from ddpnb.protocol.notation import parse_strategy
from ddpnb.reports.formatting import NOTHING, counted, number
from ddpnb.reports.inside.spans import MAX_RANKS, in_units, time_unit
from ddpnb.reports.kit import (
    ROW_NAMES,
    WAITING,
    Look,
    Picture,
    Sheet,
    Shown,
    dress,
    legend,
    name_row,
    rank_colour,
    write,
)
from ddpnb.reports.style import INK, MUTED, PAPER, PART_COLOURS, RULE, SMALL_POINTS
from ddpnb.reports.table import Table, columns, table_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_UPDATES = 36
"""Gradients that are drawn, all workers together; of many workers, three of each."""
SHOWN_WAIT_SECONDS = 1e-4
"""Draw a wait for others that lasts longer than this."""
ROW, LEAST_ROW, ROWS_HEIGHT, TICKS_HEIGHT = 0.44, 0.26, 3.6, 0.75
"""Inches: of a worker's row, with many workers, of all rows about; of an axis' ticks and label."""
SMALL = SMALL_POINTS - 2.5
BAR: Look = {"edgecolor": PAPER, "zorder": 2}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncInspection(Shown):
    """What the workers of one asynchronous run have read and written."""

    title: str
    updates: tuple[Update, ...]
    """In the order of the versions."""
    num_ranks: int
    bound: int
    """Steps that a worker may be ahead of the slowest; -1: any number."""
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()

    def window(self) -> tuple[Update, ...]:
        """Return the updates that are drawn: about a death, else after the first few."""
        num = max(MAX_UPDATES, 3 * min(self.num_ranks, MAX_RANKS))
        first = max(0, min(2 * self.num_ranks, len(self.updates) - num))
        deaths = [mark.seconds for mark in self.marks if mark.kind.is_death]
        if deaths:
            before = sum(each.end <= deaths[0] for each in self.updates)
            first = max(0, min(before - num // 2, len(self.updates) - num))
        return self.updates[first : first + num]

    def mean_staleness(self, rank: int) -> float:
        """Return the mean over all gradients of a worker, drawn or not; NaN: it has none."""
        own = [each.staleness for each in self.updates if each.rank == rank]
        return float(np.mean(own)) if own else float("nan")

    def table(self) -> Table:
        """Return a row for each worker, with what they show as notes."""
        rows = []
        for rank in range(self.num_ranks):
            own = [each for each in self.updates if each.rank == rank]
            seconds = [each.end - each.start for each in own]
            waited = sum(each.waited for each in own)
            rows.append(
                table_row(
                    f"rank {rank}",
                    len(own),
                    in_units(float(np.median(seconds))) if own else NOTHING,
                    number(self.mean_staleness(rank), 2),
                    max((each.staleness for each in own), default=NOTHING),
                    in_units(waited) if waited > SHOWN_WAIT_SECONDS else NOTHING,
                )
            )
        return Table(
            caption=f"{self.title}: what the workers read and wrote, all steps",
            columns=columns("worker", "gradients", "step", "mean staleness", "oldest", "waited"),
            rows=tuple(rows),
            notes=tuple(self.words()),
        )

    def words(self) -> list[str]:
        """Return what the updates show, one sentence or two each."""
        usual = 0 if self.bound == 0 else self.num_ranks - 1
        said = [
            "Staleness: updates by others between a worker's read and the use of its gradient; "
            f"with {counted(self.num_ranks, 'equally fast worker')} about {usual}."
        ]
        if self.bound >= 0:
            said.append(
                f"The bound: a worker that is more than {counted(self.bound, 'step')} ahead "
                "of the slowest waits; a black bar marks where."
            )
        marks = [
            f"Rank {mark.rank} {mark.text} at {mark.seconds:.2f} s."
            for mark in self.marks
            if mark.kind is not MarkKind.OTHER
        ]
        return [*said, *([" ".join(marks)] if marks else []), *self.notes]

    def pictures(self) -> list[Picture]:
        """Return the picture."""
        return [Picture(draw_versions(self), self.title)]

    def text(self) -> str:
        """Return the drawn updates in words, and the table."""
        shown = self.window()
        lines = [
            f"{self.title}: {counted(len(self.updates), 'gradient')}, of which "
            f"{len(shown)} are drawn"
        ]
        begin = min((each.start for each in shown), default=0.0)
        for each in shown:
            waits = f", waits {in_units(each.waited)}" if each.waited > SHOWN_WAIT_SECONDS else ""
            lines.append(
                f"  {in_units(each.written - begin):>8}  rank {each.rank} reads "
                f"{each.version_read}, writes {each.version_written}: "
                f"staleness {each.staleness}{waits}"
            )
        return "\n".join([*lines, "", self.table().text()])


def async_inspection(comparison: Comparison) -> AsyncInspection:
    """Return what the workers of a run have read and written; the last one, if there are several.

    Raises:
        UserError: no run in the comparison is of async, or it has no versions.
    """
    runs = [run for run in comparison.runs if parse_strategy(run.name).name == "async"]
    if not runs:
        names = ", ".join(dict.fromkeys(run.name for run in comparison.runs)) or "no run"
        raise UserError(f"Versions are those of async, and {comparison.name} has {names}.")
    run = runs[-1]
    if not run.events["version"].any():
        raise UserError(f"{run.name} has no versions in its record: train it again to have them.")
    task = f" on {comparison.task}" if comparison.task not in ("", "cell") else ""
    return AsyncInspection(
        title=f"{run.name}{task}",
        updates=updates_of(run),
        num_ranks=run.header.num_workers if run.header else 1 + int(run.events["rank"].max()),
        bound=int(parse_strategy(run.name).options.get("bound", -1)),
        marks=run.marks,
        notes=tuple(run.header.notes) if run.header else (),
    )


def updates_of(run: RunSnapshot) -> tuple[Update, ...]:
    """Return a run's updates, in the order of the versions that they made."""
    found = []
    for row in run.events:
        end, waited = float(row["seconds"]), float(row["waiting"])
        pushed = end - float(row["communication"]) - waited
        spent = sum(float(row[part]) for part in ("data", "forward", "backward", "optimizer"))
        found.append(
            Update(
                rank=int(row["rank"]),
                start=pushed - spent,
                pushed=pushed,
                released=pushed + waited,
                end=end,
                staleness=max(int(row["staleness"]), 0),
                version_written=int(row["version"]),
            )
        )
    return tuple(sorted(found, key=lambda each: (each.version_written, each.written)))


# -- drawn ---------------------------------------------------------------------------------


def draw_versions(inspection: AsyncInspection) -> "Figure":
    """Return two panels of up to 16 workers: who computed when; how stale each gradient was."""
    ranks = range(min(inspection.num_ranks, MAX_RANKS))
    shown = [each for each in inspection.window() if each.rank in ranks]
    rest = inspection.num_ranks - len(ranks)
    notes = [*([f"And {rest} more workers."] if rest > 0 else []), *inspection.words()]
    row = max(LEAST_ROW, min(ROW, ROWS_HEIGHT / len(ranks)))
    lanes, arrows = row * (len(ranks) + 1), row * len(ranks)
    title = f"{inspection.title}: which version each worker reads and writes"
    sheet = Sheet(title, lanes + arrows + 2 * TICKS_HEIGHT, notes)
    _draw_lanes(sheet.axes(lanes, left=ROW_NAMES), inspection, shown, ranks)
    below = sheet.axes(arrows, down=lanes + TICKS_HEIGHT, left=ROW_NAMES)
    _draw_arrows(below, inspection, shown, ranks)
    return sheet.figure


def _draw_lanes(
    axes: "Axes", inspection: AsyncInspection, shown: Sequence[Update], ranks: range
) -> None:
    """Draw the server above, with a dot for each version; a row for each worker below."""
    begin = min((each.start for each in shown), default=0.0)
    end = max((each.end for each in shown), default=1.0)
    scale, unit = time_unit(end - begin)
    length = (end - begin) * scale
    dress(axes, x_label=f"{unit} of training" + f", from {begin:.3g} s on" * (begin >= 1e-3))
    axes.set(xlim=(0, length), ylim=(len(ranks) + 1, -0.15), yticks=[])
    name_row(axes, 0.5, "server")
    axes.axhline(0.5, color=MUTED, linewidth=1.0, zorder=1)
    for rank in ranks:
        own = [each for each in shown if each.rank == rank]
        name_row(axes, rank + 1.5, f"rank {rank}", rank=rank)
        bars = [((e.start - begin) * scale, (e.pushed - e.start) * scale) for e in own]
        axes.broken_barh(bars, (rank + 1.2, 0.6), facecolor=rank_colour(rank), **BAR)
        sent = [((e.released - begin) * scale, (e.end - e.released) * scale) for e in own]
        axes.broken_barh(sent, (rank + 1.38, 0.24), color=PART_COLOURS["communication"], zorder=3)
        waits = [each for each in own if each.waited > SHOWN_WAIT_SECONDS]
        bars = [((e.pushed - begin) * scale, e.waited * scale) for e in waits]
        axes.broken_barh(bars, (rank + 1.2, 0.6), zorder=3, **WAITING)
        if inspection.bound >= 0:
            walls = [x for x, _ in bars]
            axes.vlines(walls, rank + 1.05, rank + 1.95, color=INK, linewidth=3, zorder=4)
    labelled = -length
    for each in shown:
        at, colour = (each.written - begin) * scale, rank_colour(each.rank)
        axes.plot([at, at], [0.5, each.rank + 1.2], color=colour, linewidth=0.9, zorder=1)
        axes.plot([at], [0.5], "o", color=colour, markersize=5, clip_on=False)
        if at - labelled > length / 40:
            labelled = at
            write(axes, at, 0.13, str(each.version_written), points=SMALL, ha="center")
    for mark in inspection.marks:
        if mark.kind.is_death and mark.rank in ranks and begin <= mark.seconds <= end:
            x, y = (mark.seconds - begin) * scale, mark.rank + 1.5
            axes.plot([x], [y], "X", color=INK, markersize=13, zorder=5)
            write(axes, x, y, f"   {mark.text}", zorder=5)
    sends = PART_COLOURS["communication"]
    names = {"computes": rank_colour(0), "exchanges with the server": sends}
    legend(axes, {**names, "waits for others": WAITING})


def _draw_arrows(
    axes: "Axes", inspection: AsyncInspection, shown: Sequence[Update], ranks: range
) -> None:
    """Draw an arrow for each gradient, from the version read to the one that it updated."""
    dress(axes, x_label="version: an arrow from the one that was read to the one that was updated")
    low = min((each.version_read for each in shown), default=0)
    high = max((each.version_written for each in shown), default=1)
    axes.set(ylim=(len(ranks), 0), yticks=[])
    axes.set_xlim(low - 0.6, high + 0.6 + 0.13 * (high - low))  # room for a text
    for rank in ranks:
        colour = rank_colour(rank)
        own = [each for each in shown if each.rank == rank]
        for index, each in enumerate(own):
            y = rank + (0.32 if index % 2 else 0.68)
            applied = each.version_written - 1
            axes.plot([applied], [y], "o", color=colour, markersize=4.5)
            if applied > each.version_read:
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkB": 2}
                axes.annotate("", (applied, y), (each.version_read, y), arrowprops=arrow)
        mean = number(inspection.mean_staleness(rank), 2)
        look: Look = {"transform": axes.get_yaxis_transform(), "ha": "right"}
        text = f"mean of all steps: {mean}"
        write(axes, 1.0, rank + 0.5, text, points=SMALL, colour=MUTED, **look)
        name_row(axes, rank + 0.5, f"rank {rank}", rank=rank)
        if rank:
            axes.axhline(rank, color=RULE, linewidth=1.0)
