"""Shows which versions of the parameters asynchronous workers read and write.  Runs in the kernel.

For each gradient, the server reports the new version and the gradient's staleness.  From these two
numbers, ddpnb computes the version that the worker had read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark, MarkKind
from ddpnb.protocol.notation import parse_strategy
from ddpnb.reports.formatting import counted, number, time_unit
from ddpnb.reports.kit import (
    MAX_DRAWN_RANKS,
    ROW_NAMES,
    WAITING_LOOK,
    Look,
    Picture,
    Sheet,
    Shown,
    dress,
    legend,
    name_row,
    rank_colour,
    write_label,
)
from ddpnb.reports.style import INK, MUTED, PAPER, PART_COLOURS, RULE, TINY_POINTS
from ddpnb.results.comparison import Comparison
from ddpnb.results.run import COMPUTED, RunSnapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_UPDATES = 36
"""Minimum number of gradients to draw.  ddpnb also draws at least three per worker."""
SHOWN_WAIT_SECONDS = 1e-4
"""The time that a worker waits for others is drawn only if it is longer than this, in seconds."""
MAX_ROW_HEIGHT, LEAST_ROW, ROWS_HEIGHT, AXIS_HEIGHT = 0.44, 0.26, 3.6, 0.75
"""Maximum and minimum height of a row, height of all rows, height of the ticks, in inches."""
SENDS = PART_COLOURS["communication"]

Updates = Any
"""A record array with a row for each update: the new ``version``, the ``rank`` of the gradient,
the version that the worker had ``read``, and the ``staleness``.  All other fields are times in
seconds.  The worker's step begins at ``start`` and ends at ``end``.  The worker pushes the gradient
at ``pushed``, and waits until ``released``.  The server writes the parameters at ``written``."""


@final
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AsyncInspection(Shown):
    """The versions that the workers of one asynchronous run have read and written."""

    title: str
    updates: Updates
    """The updates, in the order of the versions."""
    num_ranks: int
    bound: int
    """Maximum number of steps that a worker may be ahead of the slowest; -1 if unlimited."""
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()

    def window(self) -> Updates:
        """Return the updates around the first death, or near the start if no worker has died."""
        num = max(MAX_UPDATES, 3 * min(self.num_ranks, MAX_DRAWN_RANKS))
        first = 2 * self.num_ranks
        if deaths := [mark.seconds for mark in self.marks if mark.kind.is_death]:
            first = int(np.sum(self.updates.end <= deaths[0])) - num // 2
        first = max(0, min(first, len(self.updates) - num))
        return self.updates[first : first + num]

    def about(self, rank: int) -> str:
        """Return a text with the number of a worker's gradients and with their mean staleness."""
        own = self.updates.staleness[self.updates.rank == rank]
        mean = own.mean() if len(own) else math.nan
        return f"{counted(len(own), 'gradient')}, mean staleness {number(mean, 2)}"

    def words(self) -> list[str]:
        """Return sentences about the staleness, the bound and the events of the run."""
        usual = 0 if self.bound == 0 else self.num_ranks - 1
        said = [
            "Staleness is the number of updates by other workers between a worker's read and its "
            f"own update: about {usual} with {counted(self.num_ranks, 'equally fast worker')}."
        ]
        if self.bound >= 0:
            said.append(
                f"bound={self.bound} means that a worker waits if it is more than "
                f"{counted(self.bound, 'step')} ahead of the slowest worker."
            )
        for mark in self.marks:
            if mark.kind is not MarkKind.OTHER:
                said.append(f"Rank {mark.rank} {mark.text} at {mark.seconds:.2f} s.")
        return [*said, *self.notes]

    def pictures(self) -> list[Picture]:
        """Return a list that contains the picture."""
        return [Picture(draw_versions(self), self.title)]

    def text(self) -> str:
        """Return the title, a line for each worker, and the sentences about the run."""
        workers = [f"rank {rank}: {self.about(rank)}" for rank in range(self.num_ranks)]
        return "\n".join([self.title, *workers, *self.words()])


def async_inspection(comparison: Comparison) -> AsyncInspection:
    """Return the inspection of the last ``async`` run of a comparison.

    Raises:
        UserError: the comparison has no run of ``async``.
    """
    runs = [run for run in comparison.runs if parse_strategy(run.name).name == "async"]
    if not runs:
        names = ", ".join(dict.fromkeys(run.name for run in comparison.runs)) or "no run"
        raise UserError(
            f"Only runs of async can be inspected, but {comparison.name} contains {names}. Train "
            "with %ddp_compare async first."
        )
    run = runs[-1]
    task = f" on {comparison.task}" if comparison.task not in ("", "cell") else ""
    return AsyncInspection(
        title=f"{run.name}{task}",
        updates=updates_of(run),
        num_ranks=run.header.num_workers if run.header else 1 + int(run.events["rank"].max()),
        bound=int(parse_strategy(run.name).options.get("bound", -1)),
        marks=run.marks,
        notes=tuple(run.header.notes) if run.header else (),
    )


def updates_of(run: RunSnapshot) -> Updates:
    """Return the updates of a run, in the order of their versions."""
    rows = run.events
    exchanged, waited = rows["communication"], rows["waiting"]
    pushed = rows["seconds"] - exchanged - waited
    staleness = np.maximum(rows["staleness"], 0)
    found = {
        "version": rows["version"],
        "rank": rows["rank"],
        "read": rows["version"] - 1 - staleness,
        "staleness": staleness,
        "start": pushed - sum(rows[part] for part in COMPUTED),
        "pushed": pushed,
        "written": pushed + exchanged / 2,  # an estimate: half of the exchange
        "released": pushed + waited,
        "end": rows["seconds"],
    }
    types = [(name, values.dtype) for name, values in found.items()]
    updates: Updates = np.rec.fromarrays(found.values(), dtype=types)
    return updates[np.lexsort((updates.written, updates.version))]


# -- the picture ---------------------------------------------------------------------------


def draw_versions(inspection: AsyncInspection) -> "Figure":
    """Return a figure with two panels: the workers over time, and the staleness of gradients."""
    ranks = range(min(inspection.num_ranks, MAX_DRAWN_RANKS))
    shown = inspection.window()
    shown = shown[shown.rank < len(ranks)]
    rest = inspection.num_ranks - len(ranks)
    hidden = [f"{rest} more workers are not shown."] if rest else []
    notes = [*hidden, *inspection.words()]
    row = max(LEAST_ROW, min(MAX_ROW_HEIGHT, ROWS_HEIGHT / len(ranks)))
    lanes, arrows = row * (len(ranks) + 1), row * len(ranks)
    title = f"{inspection.title}: which version each worker reads and writes"
    sheet = Sheet(title, lanes + arrows + 2 * AXIS_HEIGHT, notes)
    _draw_lanes(sheet.axes(lanes, left=ROW_NAMES), inspection, shown, ranks)
    below = sheet.axes(arrows, down=lanes + AXIS_HEIGHT, left=ROW_NAMES)
    _draw_arrows(below, inspection, shown, ranks)
    return sheet.figure


def _draw_lanes(
    axes: "Axes", inspection: AsyncInspection, shown: Updates, ranks: Sequence[int]
) -> None:
    """Draw the server's row with a dot for each version, and below it a row for each worker."""
    begin, end = float(shown.start.min()), float(shown.end.max())
    scale, unit = time_unit(end - begin)
    length = (end - begin) * scale

    def draw(since: Any, until: Any, top: float, height: float, look: Look) -> None:
        places = zip((since - begin) * scale, (until - since) * scale, strict=True)
        axes.broken_barh(list(places), (top, height), **look)

    dress(axes, x_label=f"{unit} of training" + f", from {begin:.3g} s on" * (begin >= 1e-3))
    axes.set(xlim=(0, length), ylim=(len(ranks) + 1, -0.15), yticks=[])
    name_row(axes, 0.5, "server")
    axes.axhline(0.5, color=MUTED, linewidth=1.0, zorder=1)
    for rank in ranks:
        top = rank + 1.2
        name_row(axes, top + 0.3, f"rank {rank}", rank=rank)
        own = shown[shown.rank == rank]
        bar = {"facecolor": rank_colour(rank), "edgecolor": PAPER, "zorder": 2}
        draw(own.start, own.pushed, top, 0.6, bar)
        draw(own.released, own.end, top + 0.18, 0.24, {"color": SENDS, "zorder": 3})
        late = own[own.released - own.pushed > SHOWN_WAIT_SECONDS]
        draw(late.pushed, late.released, top, 0.6, {"zorder": 3, **WAITING_LOOK})
    labelled = -length
    for each in shown:
        at, colour = (each.written - begin) * scale, rank_colour(each.rank)
        axes.plot([at, at], [0.5, each.rank + 1.2], color=colour, linewidth=0.9, zorder=1)
        axes.plot([at], [0.5], "o", color=colour, markersize=5, clip_on=False)
        if at - labelled > length / 40:
            labelled = at
            write_label(axes, at, 0.13, f"{each.version}", points=TINY_POINTS, ha="center")
    for mark in inspection.marks:
        if mark.kind.is_death and mark.rank in ranks and begin <= mark.seconds <= end:
            x, y = (mark.seconds - begin) * scale, mark.rank + 1.5
            axes.plot([x], [y], "X", color=INK, markersize=13, zorder=5)
            write_label(axes, x, y, f"   {mark.text}", zorder=5)
    names = {"computes": rank_colour(0), "exchanges with the server": SENDS}
    legend(axes, {**names, "waits for others": WAITING_LOOK})


def _draw_arrows(
    axes: "Axes", inspection: AsyncInspection, shown: Updates, ranks: Sequence[int]
) -> None:
    """Draw an arrow for each gradient: from the version that was read to the new version."""
    dress(axes, x_label="version (arrows: from the version that was read to the updated version)")
    low, high = shown.read.min(), shown.version.max()
    axes.set(ylim=(len(ranks), 0), yticks=[])
    axes.set_xlim(low - 0.6, high + 0.6 + 0.25 * (high - low))  # room for a text
    for rank in ranks:
        colour = rank_colour(rank)
        for index, each in enumerate(shown[shown.rank == rank]):
            y = rank + (0.32 if index % 2 else 0.68)
            updated = each.version - 1
            axes.plot([updated], [y], "o", color=colour, markersize=4.5)
            if updated > each.read:
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkB": 2}
                axes.annotate("", (updated, y), (each.read, y), arrowprops=arrow)
        look: Look = {"transform": axes.get_yaxis_transform(), "ha": "right"}
        about = inspection.about(rank)
        write_label(axes, 1.0, rank + 0.5, about, points=TINY_POINTS, colour=MUTED, **look)
        name_row(axes, rank + 0.5, f"rank {rank}", rank=rank)
        if rank:
            axes.axhline(rank, color=RULE, linewidth=1.0)
