"""What asynchronous workers read and write: versions, staleness, the bound (kernel).

Pure functions of a run's steps.  A worker's push and its next pull are one request to the server.
So unless it had to wait there, it reads the version that it has just written; with the staleness of
each gradient, which the server reports, all versions follow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import Update
from ddpnb.protocol.messages import NO_STALENESS, Mark, MarkKind
from ddpnb.protocol.notation import parse_strategy
from ddpnb.reports.formatting import counted, number
from ddpnb.reports.inside.spans import MAX_RANKS, in_units, time_unit
from ddpnb.reports.inside.timeline import (
    BOTTOM,
    LEFT,
    NOTE_HEIGHT,
    RIGHT,
    WIDTH,
    Shades,
    shades,
    sheet,
    wrapped,
)
from ddpnb.reports.style import FONT_POINTS, PART_COLOURS, SMALL_POINTS
from ddpnb.reports.table import Column, Table, table_row

MAX_UPDATES = 36
"""Gradients that are drawn, all workers together; of many workers, three of each."""
WAITED_SECONDS = 1e-4
"""From which wait on a worker's next version is not the one that it has just written."""
_DEATHS = (MarkKind.KILLED, MarkKind.DIED)
COLOURS = (
    "#3f6fb0", "#c2703d", "#3d8a5f", "#8a5aa8", "#a8893a", "#b0486b", "#4a8c93", "#7a7a7a",
)  # fmt: skip
"""Of the workers, in turns."""
ROW, LEAST_ROW, ROWS_HEIGHT, PANEL_GAP = 0.44, 0.26, 3.6, 0.95
"""Inches: a worker's row, with many workers, of all rows about; and between two panels."""
AHEAD_HEIGHT = 1.5
TIMES = (
    "Each worker's clock starts when all have come to a barrier.  A write is drawn in the middle "
    "of its exchange with the server."
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncInspection:
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
        deaths = [mark.seconds for mark in self.marks if mark.kind in _DEATHS]
        if deaths:
            before = sum(each.end <= deaths[0] for each in self.updates)
            first = max(0, min(before - num // 2, len(self.updates) - num))
        return self.updates[first : first + num]

    def table(self) -> Table:
        """Return a row for each worker, with what they show as notes."""
        titles = ["worker", "gradients", "step", "staleness", "oldest", "waited"]
        rows = []
        for rank in range(self.num_ranks):
            own = [each for each in self.updates if each.rank == rank]
            if not own:
                rows.append(table_row(f"rank {rank}", 0, "–", "–", "–", "–"))
                continue
            staleness = [each.staleness for each in own]
            waited = sum(each.waited for each in own)
            rows.append(
                table_row(
                    f"rank {rank}",
                    len(own),
                    in_units(float(np.median([each.end - each.start for each in own]))),
                    number(float(np.mean(staleness)), 2),
                    max(staleness),
                    in_units(waited) if waited > WAITED_SECONDS else "–",
                )
            )
        columns = tuple(Column(title=each, is_number=at > 0) for at, each in enumerate(titles))
        return Table(
            caption=f"{self.title}: what the workers read and wrote",
            columns=columns,
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
                "of the slowest waits at the wall."
            )
        for mark in self.marks:
            if mark.kind is MarkKind.OTHER:
                continue
            said.append(f"Rank {mark.rank} {mark.text} at {mark.seconds:.2f} s.")
        return [*said, TIMES, *self.notes]

    def figures(self, *, dark: bool = False) -> list[tuple[Figure, str]]:
        """Return the picture, with its text."""
        return [(draw_versions(self, dark=dark), versions_text(self))]

    def __repr__(self) -> str:
        return f"{versions_text(self)}\n\n{self.table().text()}"


def async_inspection(comparison: Comparison) -> AsyncInspection:
    """Return what the workers of a run have read and written; the last one, if there are several.

    Raises:
        UserError: no run in the comparison is of async, or it has made no step.
    """
    runs = [run for run in comparison.runs if parse_strategy(run.name).name == "async"]
    if not runs:
        names = ", ".join(dict.fromkeys(run.name for run in comparison.runs)) or "no run"
        raise UserError(f"Versions are those of async, and {comparison.name} has {names}.")
    run = runs[-1]
    if not len(run.events):
        raise UserError(f"{run.name} has made no step: there is nothing to draw.")
    num_ranks = run.header.num_workers if run.header else 1 + int(run.events["rank"].max())
    bound = int(parse_strategy(run.name).options.get("bound", -1))
    updates, num_guessed = updates_of(run, bound)
    notes = list(run.header.notes) if run.header else []
    if num_guessed:
        notes.append(f"The order of {counted(num_guessed, 'update')} is that of the clocks.")
    task = f" on {comparison.task}" if comparison.task not in ("", "cell") else ""
    return AsyncInspection(
        title=f"{run.name}{task}",
        updates=tuple(updates),
        num_ranks=num_ranks,
        bound=bound,
        marks=run.marks,
        notes=tuple(notes),
    )


def updates_of(run: RunSnapshot, bound: int) -> tuple[list[Update], int]:
    """Return a run's updates in the order of their versions, and how many had to be guessed."""
    waiting: dict[int, list[Update]] = {}
    for row in np.sort(run.events, order=["rank", "step"]):
        rank, end = int(row["rank"]), float(row["seconds"])
        communication, waited = float(row["communication"]), float(row["waiting"])
        spent = sum(float(row[part]) for part in ("data", "forward", "backward", "optimizer"))
        pushed = end - communication - waited
        update = Update(
            rank=rank,
            start=pushed - spent,
            pushed=pushed,
            released=pushed + waited,
            end=end,
            staleness=max(int(row["staleness"]), 0) if row["staleness"] != NO_STALENESS else 0,
        )
        waiting.setdefault(rank, []).append(update)
    return (_in_rounds(waiting), 0) if bound == 0 else _replayed(waiting, has_bound=bound > 0)


def _in_rounds(waiting: Mapping[int, list[Update]]) -> list[Update]:
    """Put updates in order where the k-th one is made of each worker's k-th gradient."""
    numbered = [
        replace(each, version_read=number_, version_written=number_ + 1)
        for own in waiting.values()
        for number_, each in enumerate(own)
    ]
    return sorted(numbered, key=lambda each: (each.version_written, each.written))


def _replayed(waiting: Mapping[int, list[Update]], *, has_bound: bool) -> tuple[list[Update], int]:
    """Put the workers' updates into one order, with their versions.

    The next one is that of a worker which has read version r with a staleness s, where r + s is
    the present version.  What a worker has read is not known where it waited, or has just joined.
    """
    found: list[Update] = []
    at = dict.fromkeys(waiting, 0)
    read: dict[int, int | None] = dict.fromkeys(waiting, 0)
    num_guessed = 0
    for version in range(sum(map(len, waiting.values()))):
        ahead = {rank: own[at[rank]] for rank, own in waiting.items() if at[rank] < len(own)}
        known = [u for rank, u in ahead.items() if _is_next(read[rank], u, version)]
        unknown = [u for rank, u in ahead.items() if read[rank] is None]
        num_guessed += not known and not unknown
        chosen = min(known or unknown or ahead.values(), key=lambda each: each.written)
        rank, own = chosen.rank, waiting[chosen.rank]
        read_version = max(version - chosen.staleness, 0)
        found.append(replace(chosen, version_read=read_version, version_written=version + 1))
        at[rank] += 1
        after = own[at[rank]] if at[rank] < len(own) else None
        is_joined = after is not None and after.start - chosen.end > 10 * WAITED_SECONDS
        has_waited = has_bound and chosen.waited > WAITED_SECONDS
        read[rank] = None if has_waited or is_joined else version + 1
    return found, num_guessed


def _is_next(read: int | None, update: Update, version: int) -> bool:
    return read is not None and read + update.staleness == version


# -- in words ------------------------------------------------------------------------------


def versions_text(inspection: AsyncInspection) -> str:
    """Return the drawn updates in words, a line each."""
    shown = inspection.window()
    lines = [
        f"{inspection.title}: {counted(len(inspection.updates), 'gradient')}, of which "
        f"{len(shown)} are drawn"
    ]
    begin = min((each.start for each in shown), default=0.0)
    for each in shown:
        waits = f", waits {in_units(each.waited)}" if each.waited > WAITED_SECONDS else ""
        lines.append(
            f"  {in_units(each.written - begin):>8}  rank {each.rank} reads {each.version_read}, "
            f"writes {each.version_written}: staleness {each.staleness}{waits}"
        )
    return "\n".join(lines)


# -- drawn ---------------------------------------------------------------------------------


def draw_versions(inspection: AsyncInspection, *, dark: bool = False) -> Figure:
    """Return three panels: who computed when; how stale each gradient was; who was ahead.

    Up to 16 workers are drawn.
    """
    look, shown = shades(dark), inspection.window()
    ranks = range(min(inspection.num_ranks, MAX_RANKS))
    rest = inspection.num_ranks - len(ranks)
    notes = [inspection.words()[0]] + ([f"And {rest} more workers."] if rest > 0 else [])
    lines = [line for note in notes for line in wrapped(note)]
    row = max(LEAST_ROW, min(ROW, ROWS_HEIGHT / len(ranks)))
    heights = row * (len(ranks) + 1), row * len(ranks), AHEAD_HEIGHT
    height = 1.15 + sum(heights) + 2 * PANEL_GAP + BOTTOM + NOTE_HEIGHT * len(lines)
    title = f"{inspection.title}: which version each worker reads and writes"
    figure = sheet(height, title, look)
    scene = _Scene(
        inspection=inspection,
        shown=shown,
        ranks=ranks,
        begin=min((each.start for each in shown), default=0.0),
        end=max((each.end for each in shown), default=1.0),
        look=look,
    )
    top = 1.15
    for size, draw in zip(heights, (_draw_lanes, _draw_arrows, _draw_ahead), strict=True):
        place = (LEFT / WIDTH, 1 - (top + size) / height)
        axes = figure.add_axes((*place, (WIDTH - LEFT - RIGHT) / WIDTH, size / height))
        draw(axes, scene)
        top += size + PANEL_GAP
    _legend(figure.axes[0], look, heights[0])
    for index, line in enumerate(reversed(lines)):
        y = (0.32 + NOTE_HEIGHT * index) / height
        figure.text(0.3 / WIDTH, y, line, fontsize=SMALL_POINTS - 1, color=look.muted)
    return figure


class _Scene(NamedTuple):
    inspection: AsyncInspection
    shown: Sequence[Update]
    ranks: Sequence[int]
    begin: float
    end: float
    look: Shades


def _draw_lanes(axes: Any, scene: _Scene) -> None:
    """Draw the server above, with a tick for each version; a row for each worker below."""
    inspection, shown, ranks, begin, end, look = scene
    scale, unit = time_unit(end - begin)
    _dress(axes, look, f"{unit} of training" + f", from {begin:.3g} s on" * (begin >= 1e-3))
    axes.set_xlim(0, (end - begin) * scale)
    axes.set_ylim(len(ranks) + 1, -0.15)
    _name(axes, 0.5, "server", look)
    axes.axhline(0.5, color=look.muted, linewidth=1.0, zorder=1)
    labelled = -math.inf
    for each in shown:
        if each.rank >= len(ranks):
            continue
        row, colour = each.rank + 1, COLOURS[each.rank % len(COLOURS)]
        x0, x1, x2, x3, at = (
            (moment - begin) * scale
            for moment in (each.start, each.pushed, each.released, each.end, each.written)
        )
        bar = Rectangle((x0, row + 0.2), x1 - x0, 0.6, facecolor=colour, edgecolor=look.paper)
        axes.add_patch(bar)
        if each.waited > WAITED_SECONDS:
            wait = Rectangle((x1, row + 0.2), x2 - x1, 0.6, facecolor=look.paper)
            wait.set(edgecolor=PART_COLOURS["waiting"], hatch="////", linewidth=0.9)
            axes.add_patch(wait)
            if inspection.bound >= 0:  # the wall
                axes.plot([x1, x1], [row + 0.05, row + 0.95], color=look.ink, linewidth=3)
        exchange = Rectangle((x2, row + 0.38), x3 - x2, 0.24, color=PART_COLOURS["communication"])
        axes.add_patch(exchange)
        axes.plot([at, at], [0.5, row + 0.2], color=colour, linewidth=0.9, alpha=0.55, zorder=1)
        axes.plot([at], [0.5], "o", color=colour, markersize=5, clip_on=False)
        if at - labelled > (end - begin) * scale / 40:
            labelled = at
            style: dict[str, Any] = {"fontsize": SMALL_POINTS - 2.5, "color": look.ink}
            axes.text(at, 0.28, str(each.version_written), ha="center", va="bottom", **style)
    for rank in ranks:
        _name(axes, rank + 1.5, f"rank {rank}", look)
    for mark in inspection.marks:
        x = (mark.seconds - begin) * scale
        if mark.kind in _DEATHS and mark.rank < len(ranks) and begin <= mark.seconds <= end:
            axes.plot([x], [mark.rank + 1.5], "X", color=look.ink, markersize=13, zorder=5)
            axes.text(x, mark.rank + 1.5, f"   {mark.text}", va="center", color=look.ink, zorder=5)


def _draw_arrows(axes: Any, scene: _Scene) -> None:
    """Draw an arrow for each gradient, from the version read to that which was then updated."""
    _, shown, ranks, _, _, look = scene
    _dress(axes, look, "version: an arrow from the one that was read to the one that was updated")
    axes.set_ylim(len(ranks), 0)
    low = min((each.version_read for each in shown), default=0)
    high = max((each.version_written for each in shown), default=1)
    axes.set_xlim(low - 0.6, high + 0.6 + 0.1 * (high - low))  # room for a text
    for rank in ranks:
        colour = COLOURS[rank % len(COLOURS)]
        own = [each for each in shown if each.rank == rank]
        for index, each in enumerate(own):
            y = rank + (0.32 if index % 2 else 0.68)
            applied = each.version_written - 1
            axes.plot([applied], [y], "o", color=colour, markersize=4.5)
            if applied > each.version_read:
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkB": 2}
                axes.annotate("", (applied, y), (each.version_read, y), arrowprops=arrow)
        mean = sum(each.staleness for each in own) / len(own) if own else math.nan
        _name(axes, rank + 0.5, f"rank {rank}", look)
        text = f"{number(mean, 2)} on average" if own else "no gradient"
        style: dict[str, Any] = {"fontsize": SMALL_POINTS - 2.5, "color": look.muted}
        style |= {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "top"}
        axes.text(1.0, rank + 0.06, text, **style)
        if rank:
            axes.axhline(rank, color=look.rule, linewidth=1.0)


def _draw_ahead(axes: Any, scene: _Scene) -> None:
    """Draw how many steps each worker is ahead of the slowest, and the bound as a wall."""
    inspection, _, ranks, begin, end, look = scene
    scale, unit = time_unit(end - begin)
    _dress(axes, look, f"{unit}: steps that each worker is ahead of the slowest")
    axes.set_xlim(0, (end - begin) * scale)
    moments, ahead = steps_ahead(inspection)
    x = (np.asarray(moments) - begin) * scale
    most = 1.0
    for rank in ranks:
        values = np.asarray(ahead[rank])
        axes.step(x, values, where="post", color=COLOURS[rank % len(COLOURS)], linewidth=2.0)
        inside = values[(np.asarray(moments) >= begin) & (np.asarray(moments) <= end)]
        most = max(most, float(np.nanmax(inside)) if np.isfinite(inside).any() else 0.0)
    bound = inspection.bound
    if bound >= 0:
        axes.axhspan(bound + 0.5, max(most, bound) + 2, color=look.muted, alpha=0.25, linewidth=0)
        axes.axhline(bound + 0.5, color=look.ink, linewidth=3)
        style: dict[str, Any] = {"fontsize": SMALL_POINTS - 2.5, "color": look.ink}
        text = f"bound {bound}: a worker above it waits"
        axes.text(1.0, 1.03, text, transform=axes.transAxes, ha="right", va="bottom", **style)
        most = max(most, bound + 1)
    axes.set_ylim(-0.25, most + 0.6)
    axes.set_yticks(sorted({0, round(most)}))


def steps_ahead(inspection: AsyncInspection) -> tuple[list[float], list[list[float]]]:
    """Return when gradients came, and how far each worker was ahead then; NaN: it is dead."""
    gone = {mark.rank: mark.seconds for mark in inspection.marks if mark.kind in _DEATHS}
    back = {mark.rank: mark.seconds for mark in inspection.marks if mark.kind is MarkKind.CAME_BACK}
    clocks = dict.fromkeys(range(inspection.num_ranks), 0)
    moments: list[float] = [0.0]
    ahead: list[list[float]] = [[0.0] for _ in clocks]
    for each in sorted(inspection.updates, key=lambda update: update.written):
        now = each.written
        living = [
            rank
            for rank in clocks
            if not (rank in gone and gone[rank] < now < back.get(rank, math.inf))
        ]
        if each.rank in back and clocks[each.rank] and each.start >= back[each.rank]:
            others = [clocks[rank] for rank in living if rank != each.rank]
            clocks[each.rank] = min(others, default=0)  # it joins at the clock of the slowest
            del back[each.rank], gone[each.rank]
        clocks[each.rank] += 1
        slowest = min((clocks[rank] for rank in living), default=0)
        moments.append(now)
        for rank, values in enumerate(ahead):
            values.append(clocks[rank] - slowest if rank in living else math.nan)
    return moments, ahead


def _dress(axes: Any, look: Shades, x_label: str) -> None:
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=look.muted)
    axes.tick_params(labelsize=SMALL_POINTS - 1, labelcolor=look.muted, color=look.muted)
    axes.grid(axis="x", color=look.rule, linewidth=1.0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _name(axes: Any, y: float, text: str, look: Shades) -> None:
    style: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": FONT_POINTS}
    axes.text(-0.01, y, text, transform=axes.get_yaxis_transform(), color=look.ink, **style)


def _legend(axes: Any, look: Shades, size: float) -> None:
    waits: dict[str, Any] = {"facecolor": look.paper, "edgecolor": PART_COLOURS["waiting"]}
    handles = [
        Patch(facecolor=COLOURS[0], label="computes"),
        Patch(facecolor=PART_COLOURS["communication"], label="exchanges with the server"),
        Patch(label="waits for others", hatch="////", **waits),
    ]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0 + 0.06 / size)}
    style: dict[str, Any] = {"fontsize": SMALL_POINTS - 1, "labelcolor": look.ink}
    axes.legend(handles=handles, ncols=3, frameon=False, borderaxespad=0.0, **place, **style)
