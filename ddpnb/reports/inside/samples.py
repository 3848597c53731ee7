"""Which rank gets which samples, and which worker which shards, as a picture and text (kernel)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import format_ranks, spoken_ranks
from ddpnb.protocol.replicas import Indices, RankSamples, SamplerSpec
from ddpnb.reports.formatting import counted, listed, percent
from ddpnb.reports.kit import (
    RANK_COLOURS,
    RIGHT,
    WIDTH,
    Look,
    Picture,
    Sheet,
    Shown,
    ink_on,
    legend,
    rank_colour,
    write,
)
from ddpnb.reports.style import INK, MUTED, PAPER, RULE
from ddpnb.reports.table import Column, Table, table_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CELLS, MAX_ROWS, MAX_RANKS, MAX_LISTED = 40, 10, 16, 24
"""Cells of a row and rows in the picture; ranks in the text, and samples that it lists for each."""

LABELS, SUMMARIES, ROW, TICKS = 1.2, 2.6, 0.42, 0.45
"""Inches: for the rows' names at the left and for their summaries at the right; of a row."""
MAX_CELL, GAP = 0.6, 0.02
POINTS = 10.5


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
        end = self.begin + min(self.num_cells, MAX_CELLS)
        owners: dict[int, list[int]] = {cell: [] for cell in range(self.begin, end)}
        for rank, indices in enumerate(self.handed_out):
            for cell in indices[indices < end].tolist():
                owners[cell].append(rank)
        return owners

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
@dataclass(frozen=True, kw_only=True, repr=False)
class Handout(Shown):
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

    def sentence(self) -> str:
        """Return what the rows show, in a few sentences."""
        return " ".join([f"{self.title}.", *self._all_notes()])

    def _all_notes(self) -> tuple[str, ...]:
        num = len(self.rows)
        rest = (f"The first {MAX_ROWS} of {num} rows are shown.",) if num > MAX_ROWS else ()
        return (*self.notes, *rest)

    def table(self) -> Table:
        """Return one row per epoch: how many each rank gets, what is repeated, what is left out."""
        columns = (
            Column(title=self.unit + "s"),
            Column(title=f"each {self.who}"),
            Column(title="more than once", is_prose=True),
            Column(title=self.absent, is_prose=True),
        )
        rows = [
            table_row(row.label, row.shares(), *map(self._named, (row.repeated(), row.absent())))
            for row in self.rows[:MAX_ROWS]
        ]
        return Table(caption=self.title, columns=columns, rows=tuple(rows), notes=self._all_notes())

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
                    lines.append(f"  {what}: {self._named(found)}")
        return "\n".join([*lines, "", *self._all_notes()]).rstrip()

    def pictures(self) -> list[Picture]:
        """Return the picture."""
        return [Picture(draw(self), self.sentence())]

    def _named(self, indices: Indices) -> str:
        """Return which cells these are: ``"sample 0"``, ``"samples 0 1"``, ``"none"``."""
        plural = "" if len(indices) == 1 else "s"
        return f"{self.unit}{plural} {_numbers(indices)}" if len(indices) else "none"


def _numbers(indices: Indices) -> str:
    """Return the first of some numbers, and how many more there are."""
    shown = " ".join(map(str, indices[:MAX_LISTED]))
    num_more = len(indices) - MAX_LISTED
    return shown if num_more <= 0 else f"{shown} ... ({num_more:,} more)"


# -- of a sampler --------------------------------------------------------------------------


def handout_of(spec: SamplerSpec, found: Sequence[RankSamples]) -> Handout:
    """Return what the ranks' samplers hand out."""
    first = found[0]
    seen = [int(epoch.max(initial=0)) + 1 for each in found for epoch in each.epochs]
    num_samples = max(*seen, *(each.num_samples for each in found))
    order = "shuffled" if spec.shuffle else "in order"
    settings = f"{order}{', drop_last' if spec.drop_last else ''}"
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
        title=f"{spec.expression or first.kind}: {counted(num_samples, 'sample')} over "
        f"{counted(len(found), 'rank')}, {f'by its {first.kind}' if spec.expression else settings}",
        unit="sample",
        who="rank",
        rows=tuple(rows),
        notes=tuple(_sampler_notes(spec, found, rows)),
        absent="left out",
    )


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
    died = sorted({mark.rank for mark in run.marks if mark.kind.is_death})
    num_workers = max(max(shards) + 1, run.header.num_workers if run.header else 0)
    whole = [np.array(shards.get(rank, ()), dtype=np.int64) for rank in range(num_workers)]
    noted = [  # whose record is shorter than its run, has got others after its last
        max(shards[report.rank]) + 1
        for report in run.reports
        if report.rank in shards and report.num_steps > len(shards[report.rank])
    ]
    end = min(noted, default=max(map(max, shards.values())) + 1)
    stretches = [(begin, min(begin + MAX_CELLS, end)) for begin in range(0, end, MAX_CELLS)]
    rows = [
        Row(
            label=f"{begin}-{stop - 1}",
            begin=begin,
            num_cells=stop - begin,
            handed_out=tuple(each[(each >= begin) & (each < stop)] for each in whole),
        )
        for begin, stop in stretches
    ]
    return Handout(
        title=f"{run.comparison}/{run.name}: shards, in the order in which they were handed out",
        unit="shard",
        who="worker",
        rows=tuple(rows),
        notes=tuple(_run_notes(run, died, end)),
        absent="not known" if died else "nobody's",
    )


def _shards_of(run: RunSnapshot) -> dict[int, tuple[int, ...]]:
    return {report.rank: report.shards for report in run.reports if report.shards}


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
    rows = handout.rows[:MAX_ROWS]
    num_columns = min(max(row.num_cells for row in rows), MAX_CELLS)
    num_ranks = max(len(row.handed_out) for row in rows)
    notes = [f"The number in a cell is its {handout.who}'s."]
    if any(len(row.repeated()) for row in rows):
        notes.append("Ringed: handed out more than once.")
    if any(len(row.absent()) for row in rows):
        notes.append(f"×: {handout.absent}.")
    height = ROW * len(rows)
    sheet = Sheet(handout.title, height + TICKS, ["  ".join(notes)])
    axes = sheet.axes(height, left=LABELS)
    axes.set(xlim=(0, WIDTH - LABELS - RIGHT), ylim=(height, 0))
    axes.axis("off")
    width = min((WIDTH - LABELS - SUMMARIES) / num_columns, MAX_CELL)
    for number, row in enumerate(rows):
        middle = (number + 0.5) * ROW
        write(axes, -0.15, middle, row.label, points=POINTS, colour=MUTED, ha="right")
        for column, owners in enumerate(row.owners().values()):
            _draw_cell(axes, column * width, middle, width, owners)
        place = min(row.num_cells, MAX_CELLS) * width + 0.15
        counts = ((len(row.repeated()), "repeated"), (len(row.absent()), handout.absent))
        summary = [row.shares(), *(f"{num:,} {what}" for num, what in counts if num)]
        more = "… " if row.num_cells > MAX_CELLS else ""
        write(axes, place, middle, more + ", ".join(summary), points=POINTS, colour=MUTED)
    if handout.unit == "sample":  # elsewhere each row has other numbers, which its label says
        below = height + 0.16
        write(axes, -0.15, below, "sample", points=POINTS, colour=MUTED, ha="right")
        for cell in range(0, num_columns, 1 if num_columns <= 24 else 5):
            x = (cell + 0.5) * width
            write(axes, x, below, f"{cell}", points=POINTS, colour=MUTED, ha="center")
    if num_ranks <= len(RANK_COLOURS):
        legend(axes, {f"{handout.who} {rank}": rank_colour(rank) for rank in range(num_ranks)})
    return sheet.figure


def _draw_cell(
    axes: "Axes", left: float, middle: float, width: float, owners: Sequence[int]
) -> None:
    """Draw a cell: halved and ringed where two ranks get it, crossed where none does."""
    parts = [(f"{rank}", rank_colour(rank)) for rank in owners] or [("×", PAPER)]
    if len(parts) > 2:
        parts = [(f"{len(owners)}×", RULE)]
    x, wide, high = left + GAP, width - 2 * GAP, ROW - 4 * GAP
    top, part = middle - high / 2, high / len(parts)
    for number, (text, colour) in enumerate(parts):
        bottom = top + number * part
        axes.bar(x, part, wide, bottom, color=colour, align="edge", linewidth=0)
        points = min(POINTS, wide * 92 / len(text), part * 50)
        look: Look = {"points": points, "colour": ink_on(colour), "ha": "center"}
        write(axes, left + width / 2, bottom + part / 2, text, **look)
    if len(owners) != 1:
        rim: Look = {"edgecolor": INK, "linewidth": 1.8}
        if not owners:
            rim = {"edgecolor": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2))}
        axes.bar(x, high, wide, top, align="edge", facecolor="none", **rim)
