"""Which rank gets which samples, and which worker which shards, as a picture and text (kernel)."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import MarkKind
from ddpnb.protocol.notation import format_ranks, spoken_ranks
from ddpnb.protocol.replicas import Indices, RankSamples, SamplerSpec
from ddpnb.reports.export.report import image_html
from ddpnb.reports.formatting import counted, listed, percent
from ddpnb.reports.result import Picture
from ddpnb.reports.style import INK, MUTED, PAPER, TITLE_POINTS, contrast_on_white
from ddpnb.reports.table import Column, Table, table_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

RANK_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
"""By rank, again from the first after the last; each cell has its rank's number too.  From
Petroff, "Accessible color sequences for data visualization", 2021."""

MAX_CELLS, NUM_LAST = 40, 10
"""A row shows all samples, or the first and, behind a gap, the last of them."""
MAX_ROWS, MAX_RANKS, MAX_STRIPS = 10, 16, 4
MAX_LISTED = 24
"""Samples that the text lists for a rank."""
SHARDS_PER_ROW = 40

WIDTH, LEFT, RIGHT = 12.0, 1.15, 2.05
TOP, BOTTOM, ROW = 0.8, 0.65, 0.42
"""All in inches; the legend's lines are as high as the rows."""
GAP = 0.02
PER_LINE = 8
"""Ranks in a line of the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was handed out in one epoch, or in one stretch of a run."""

    label: str
    begin: int
    """The number of the first cell."""
    num_cells: int
    handed_out: tuple[Indices, ...]
    """To each rank, in its order."""

    def owners(self) -> dict[int, list[int]]:
        """Return the ranks that get each shown cell; one that gets it twice is there twice."""
        owners: dict[int, list[int]] = {cell: [] for cell in self.cells() if cell is not None}
        for rank, indices in enumerate(self.handed_out):
            for cell in indices[np.isin(indices, list(owners))].tolist():
                owners[cell].append(rank)
        return owners

    def cells(self) -> list[int | None]:
        """Return the cells that are shown; None is the gap between the first and the last."""
        cells: list[int | None] = list(range(self.begin, self.begin + self.num_cells))
        if len(cells) <= MAX_CELLS:
            return cells
        return [*cells[: MAX_CELLS - NUM_LAST], None, *cells[-NUM_LAST:]]

    def repeated(self) -> Indices:
        """Return the samples that are handed out more than once."""
        return np.flatnonzero(self._counts() > 1) + self.begin

    def absent(self) -> Indices:
        """Return the samples that nobody gets."""
        return np.flatnonzero(self._counts() == 0) + self.begin

    def is_like(self, other: "Row") -> bool:
        """Return whether another row hands out the same, in the same order."""
        pairs = zip(self.handed_out, other.handed_out, strict=True)
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    def shares(self) -> str:
        """Return how many each rank gets: ``"8 each"``, ``"3 to 5 each"``."""
        sizes = [len(each) for each in self.handed_out]
        low, high = min(sizes), max(sizes)
        return f"{low:,} each" if low == high else f"{low:,} to {high:,} each"

    def _counts(self) -> Indices:
        whole = np.concatenate(self.handed_out) - self.begin
        return np.bincount(whole, minlength=self.num_cells)


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Handout:
    """Who gets what: a picture in a notebook, text elsewhere."""

    title: str
    unit: str
    """What a cell is: ``"sample"``, or ``"shard"``."""
    who: str
    """Who gets it: ``"rank"``, or ``"worker"``."""
    rows: tuple[Row, ...]
    """One for each epoch."""
    notes: tuple[str, ...]
    """Sentences for below."""
    absent: str
    """The word for a cell that nobody has."""
    absent_note: str
    """What it means."""

    def sentence(self) -> str:
        """Return what the rows show, in a few sentences."""
        return " ".join([f"{self.title}.", *self.notes])

    def table(self) -> Table:
        """Return one row per epoch: how many each rank gets, what is repeated, what is left out."""
        columns = (
            Column(title=self.unit + "s"),
            Column(title=f"each {self.who}"),
            Column(title="more than once", is_prose=True),
            Column(title=self.absent, is_prose=True),
        )
        rows = [
            table_row(row.label, row.shares(), _numbers(row.repeated()), _numbers(row.absent()))
            for row in self.rows[:MAX_ROWS]
        ]
        return Table(caption=self.title, columns=columns, rows=tuple(rows), notes=self.notes)

    def text(self) -> str:
        """Return who gets what, in the order in which each gets it."""
        lines = [self.title]
        for number, row in enumerate(self.rows[:MAX_ROWS]):
            if number and row.is_like(self.rows[number - 1]):
                lines.append(f"{row.label}: the same")
                continue
            lines += ["", f"{row.label}: {row.shares()}"]
            for rank, indices in enumerate(row.handed_out[:MAX_RANKS]):
                lines.append(f"  {self.who} {rank}: {_numbers(indices)}")
            if len(row.handed_out) > MAX_RANKS:
                rest = format_ranks(range(MAX_RANKS, len(row.handed_out)))
                lines.append(f"  {self.who}s {rest}: not listed")
            for what, found in (("more than once", row.repeated()), (self.absent, row.absent())):
                if len(found):
                    lines.append(f"  {what}: {_numbers(found)}")
        return "\n".join([*lines, "", *self.notes]).rstrip()

    def plot(self) -> Picture:
        """Return the picture; ``.figure`` is a matplotlib figure."""
        return Picture(draw(self), self.sentence())

    __repr__ = text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return picture and table together, and each alone as a fallback."""
        png = self.plot().png()
        words = f"<summary>Who gets what, in words</summary><pre>{escape(self.text())}</pre>"
        html = image_html(png, self.sentence()) + self.table().html()
        html += f"<details>{words}</details>"
        return {"text/plain": self.text(), "text/html": html, "image/png": png}


def _numbers(indices: Indices) -> str:
    """Return the first of some numbers, and how many more there are."""
    if not len(indices):
        return "none"
    shown = " ".join(map(str, indices[:MAX_LISTED]))
    num_more = len(indices) - MAX_LISTED
    return shown if num_more <= 0 else f"{shown} ... ({num_more:,} more)"


def _hidden(rows: Sequence[Row]) -> list[str]:
    """Return the note on rows that are not drawn."""
    is_all = len(rows) <= MAX_ROWS
    return [] if is_all else [f"The first {MAX_ROWS} of {len(rows)} rows are shown."]


# -- of a sampler --------------------------------------------------------------------------


def handout_of(spec: SamplerSpec, found: Sequence[RankSamples]) -> Handout:
    """Return what the ranks' samplers hand out."""
    first = found[0]
    seen = [int(epoch.max(initial=0)) + 1 for each in found for epoch in each.epochs]
    num_samples = max(*seen, *(each.num_samples for each in found))
    rows = [
        Row(
            label=f"epoch {number}",
            begin=0,
            num_cells=num_samples,
            handed_out=tuple(each.epochs[number] for each in found),
        )
        for number in range(spec.num_epochs)
    ]
    return Handout(
        title=f"{spec.expression or first.kind}: {counted(num_samples, 'sample')} "
        f"over {counted(len(found), 'rank')}{_settings(spec, first)}",
        unit="sample",
        who="rank",
        rows=tuple(rows),
        notes=(*_sampler_notes(spec, found, rows), *_hidden(rows)),
        absent="left out",
        absent_note="no rank gets it: left out",
    )


def _settings(spec: SamplerSpec, first: RankSamples) -> str:
    if spec.expression:
        return f", by its {first.kind}"
    order = "shuffled" if spec.shuffle else "in order"
    return f", {order}{', drop_last' if spec.drop_last else ''}"


def _sampler_notes(
    spec: SamplerSpec, found: Sequence[RankSamples], rows: Sequence[Row]
) -> list[str]:
    notes = []
    kinds = dict.fromkeys(each.kind for each in found)
    if len(kinds) > 1:
        notes.append(f"The ranks have different samplers: {listed(list(kinds))}.")
    if len({each.num_samples for each in found}) > 1:
        notes.append("The ranks' data sets are not equally long.")
    first = rows[0]
    sets = [np.sort(each) for each in first.handed_out]
    is_shared = len(found) > 1 and all(np.array_equal(each, sets[0]) for each in sets)
    if is_shared:
        notes.append(
            f"Every rank gets the same samples, {len(found)} times the same work: "
            "a DistributedSampler shares them out."
        )
    elif len(found) > 1 and (num := len(first.repeated())):
        why = "padding, so that all ranks get equally many"
        if not found[0].has_set_epoch:
            why = "each rank draws by itself; a DistributedSampler shares them out"
        notes.append(f"{counted(num, 'sample')} handed out more than once: {why}.")
    if num := len(first.absent()):
        notes.append(f"{counted(num, 'sample')} of {first.label} left out.")
    if not found[0].has_set_epoch:
        notes.append("It has no set_epoch: what it draws at random is an example of an epoch.")
    elif len(rows) > 1 and all(row.is_like(first) for row in rows):
        is_stuck = not spec.sets_epoch and (spec.shuffle or spec.expression)
        why = "without set_epoch(epoch) it is not shuffled anew" if is_stuck else "not shuffled"
        notes.append(f"Every epoch is the same: {why}.")
    return notes


# -- of a stored run -----------------------------------------------------------------------


def handout_of_run(name: str, comparison: Comparison) -> Handout:
    """Return which shards an asynchronous run gave to whom; the first run that has noted them.

    Raises:
        UserError: there is none.
    """
    run = next((each for each in comparison.runs if _shards_of(each)), None)
    if run is None:
        headers = [each.header for each in comparison.runs if each.header]
        if headers and all(header.synchronous for header in headers):
            raise UserError(
                f"{name} was trained synchronously: in each step every rank gets its part of the "
                "global batch; async and hogwild hand shards out."
            )
        raise UserError(f"{name} has no record of its shards: train it again to have one.")
    shards = _shards_of(run)
    died = sorted(
        {mark.rank for mark in run.marks if mark.kind in (MarkKind.KILLED, MarkKind.DIED)}
    )
    num_workers = max(max(shards) + 1, run.header.num_workers if run.header else 0)
    whole = [np.array(shards.get(rank, ()), dtype=np.int64) for rank in range(num_workers)]
    end = _known_until(run, shards)
    rows = [
        Row(
            label=f"{begin}-{min(begin + SHARDS_PER_ROW, end) - 1}",
            begin=begin,
            num_cells=min(SHARDS_PER_ROW, end - begin),
            handed_out=tuple(
                each[(each >= begin) & (each < min(begin + SHARDS_PER_ROW, end))] for each in whole
            ),
        )
        for begin in range(0, end, SHARDS_PER_ROW)
    ]
    return Handout(
        title=f"{run.comparison}/{run.name}: shards, in the order in which they were handed out",
        unit="shard",
        who="worker",
        rows=tuple(rows),
        notes=(*_run_notes(run, died, end), *_hidden(rows)),
        absent="not known" if died else "nobody's",
        absent_note="not known: a worker died" if died else "nobody has trained on it",
    )


def _shards_of(run: RunSnapshot) -> dict[int, tuple[int, ...]]:
    return {report.rank: report.shards for report in run.reports if report.shards}


def _known_until(run: RunSnapshot, shards: dict[int, tuple[int, ...]]) -> int:
    """Return the first shard of which it may not have been noted who got it."""
    ends = [
        max(shards[report.rank]) + 1
        for report in run.reports
        if report.rank in shards and report.num_steps > len(shards[report.rank])
    ]
    return min(ends, default=max(map(max, shards.values())) + 1)


def _run_notes(run: RunSnapshot, died: Sequence[int], end: int) -> list[str]:
    total = sum(report.num_steps for report in run.reports)
    parts = [
        f"worker {report.rank} trained on {percent(report.num_steps / total)}"
        for report in run.reports[:MAX_RANKS]
        if report.num_steps
    ]
    notes = [f"Of {total:,} shards, {listed(parts)}."]
    if died:
        notes.append(f"What {spoken_ranks(died)} trained on before its death is not known.")
    if end < total:
        notes.append(f"Who got which was noted for the first {end:,}.")
    return notes


# -- the picture ---------------------------------------------------------------------------


def draw(handout: Handout) -> "Figure":
    """Return the picture: a row of cells for each epoch, coloured and numbered by rank."""
    from matplotlib.figure import Figure  # noqa: PLC0415  takes 0.3 s

    rows = handout.rows[:MAX_ROWS]
    num_columns = max(len(row.cells()) for row in rows)
    legend = _legend(handout, rows)
    height = TOP + len(rows) * ROW + BOTTOM + len(legend) * ROW
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    axes.text(0.3, 0.38, handout.title, size=TITLE_POINTS, color=INK, va="center", weight="bold")
    width = min((WIDTH - LEFT - RIGHT) / num_columns, 0.62)
    for number, row in enumerate(rows):
        top = TOP + number * ROW
        owners = row.owners()
        _text(axes, LEFT - 0.15, top + ROW / 2, row.label, ha="right")
        for column, cell in enumerate(row.cells()):
            left = LEFT + column * width
            if cell is None:
                _text(axes, left + width / 2, top + ROW / 2, "…", ha="center")
            else:
                _cell(axes, left, top, width, owners[cell])
        _text(
            axes,
            LEFT + len(row.cells()) * width + 0.15,
            top + ROW / 2,
            _summary(row, handout.absent),
        )
    bottom = TOP + len(rows) * ROW
    if handout.unit == "sample":  # elsewhere each row has other numbers, which its label says
        _ticks(axes, rows[0].cells(), width, bottom + 0.16)
    for number, line in enumerate(legend):
        top = bottom + BOTTOM - 0.15 + number * ROW
        for place, (example, meaning) in enumerate(line):
            left = LEFT + place * (WIDTH - LEFT) / PER_LINE
            if example is not None:
                _cell(axes, left, top, 0.36, example)
            _text(axes, left + (0.44 if example is not None else 0), top + ROW / 2, meaning)
    return figure


def _summary(row: Row, absent_word: str) -> str:
    repeated, absent = len(row.repeated()), len(row.absent())
    parts = [row.shares()]
    parts += [f"{repeated:,} repeated"] if repeated else []
    parts += [f"{absent:,} {absent_word}"] if absent else []
    return ", ".join(parts)


def _cell(axes: "Axes", left: float, top: float, width: float, owners: Sequence[int]) -> None:
    """Draw a cell: in strips and ringed where several ranks get it, crossed where none does."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415  takes 0.3 s

    x, y, wide, high = left + GAP, top + 2 * GAP, width - 2 * GAP, ROW - 4 * GAP
    centre = left + width / 2
    if not owners:
        look: dict[str, Any] = {"fill": False, "edgecolor": MUTED, "linestyle": (0, (2, 2))}
        axes.add_patch(Rectangle((x, y), wide, high, **look))
        _text(axes, centre, top + ROW / 2, "×", ha="center")
        return
    strip = high / min(len(owners), MAX_STRIPS)
    for number, rank in enumerate(owners[:MAX_STRIPS]):
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
        axes.add_patch(Rectangle((x, y + number * strip), wide, strip, color=colour, linewidth=0))
        if len(owners) <= 2:
            ink = PAPER if contrast_on_white(colour) >= 4.5 else INK
            points = min(10.5, wide * 92 / len(str(rank)), strip * 50)
            _text(axes, centre, y + (number + 0.5) * strip, f"{rank}", points, ink, ha="center")
    if len(owners) > 1:
        axes.add_patch(Rectangle((x, y), wide, high, fill=False, edgecolor=INK, linewidth=1.8))
    if len(owners) > 2:
        times = _text(axes, centre, top + ROW / 2, f"{len(owners)}×", 9.0, INK, ha="center")
        times.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.8})


def _ticks(axes: "Axes", cells: Sequence[int | None], width: float, middle: float) -> None:
    """Write the numbers of the samples below the last row."""
    every = 1 if len(cells) <= 24 else 5
    _text(axes, LEFT - 0.15, middle, "sample", ha="right")
    for column, cell in enumerate(cells):
        is_after_gap = column > 0 and cells[column - 1] is None
        if cell is not None and (cell % every == 0 or is_after_gap or column == len(cells) - 1):
            _text(axes, LEFT + (column + 0.5) * width, middle, f"{cell}", ha="center")


def _legend(
    handout: Handout, rows: Sequence[Row]
) -> list[list[tuple[tuple[int, ...] | None, str]]]:
    """Return the legend's lines: cells with their meaning, or a text without a cell."""
    num = max(len(row.handed_out) for row in rows)
    named: list[tuple[tuple[int, ...] | None, str]] = [
        ((rank,), f"{handout.who} {rank}") for rank in range(min(num, MAX_RANKS))
    ]
    lines = [named[at : at + PER_LINE] for at in range(0, len(named), PER_LINE)]
    if num > MAX_RANKS:
        rest = format_ranks(range(MAX_RANKS, num))
        lines.append([(None, f"{handout.who}s {rest}: the same colours, and their own numbers")])
    if any(len(row.repeated()) for row in rows):
        lines.append([((0, 1), "handed out more than once")])
    if any(len(row.absent()) for row in rows):
        lines.append([((), handout.absent_note)])
    return lines


def _text(
    axes: "Axes",
    x: float,
    y: float,
    text: str,
    points: float = 10.5,
    colour: str = MUTED,
    *,
    ha: str = "left",
) -> "Text":
    return axes.text(x, y, text, size=points, color=colour, ha=ha, va="center")
