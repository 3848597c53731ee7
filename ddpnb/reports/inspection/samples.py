"""A picture and a table of each rank's samples.  Runs in the kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from ddpnb.protocol.inspection import Indices, RankSamples, SamplerSpec
from ddpnb.reports.formatting import counted, listed
from ddpnb.reports.kit import (
    MAX_DRAWN_RANKS,
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
    write_label,
)
from ddpnb.reports.style import MUTED, PAPER, RULE
from ddpnb.reports.table import Column, Table, table_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CELLS = 40
"""Maximum number of cells in a row of the picture."""
MAX_LISTED = 24
"""Maximum number of samples that the table lists for each rank."""

LABELS, SUMMARIES, SAMPLES_HEIGHT, TICKS = 1.2, 2.6, 0.42, 0.45
"""Width of a row's name, width of its summary, height of a row, height of the ticks, in inches."""
MAX_CELL, GAP = 0.6, 0.02
POINTS = 10.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoutRow:
    """The samples that all ranks get in one epoch."""

    label: str
    num_cells: int
    handed_out: tuple[Indices, ...]
    """For each rank, the indices of its samples, in the order in which the rank gets them."""

    def owners(self) -> dict[int, list[int]]:
        """For each drawn sample, return the ranks that get it.  A rank may be listed twice."""
        end = min(self.num_cells, MAX_CELLS)
        owners: dict[int, list[int]] = {cell: [] for cell in range(end)}
        for rank, indices in enumerate(self.handed_out):
            for cell in indices[indices < end].tolist():
                owners[cell].append(rank)
        return owners

    def repeated(self) -> Indices:
        """Return the samples that all ranks together get more than once."""
        return np.flatnonzero(self._counts() > 1)

    def absent(self) -> Indices:
        """Return the samples that no rank gets."""
        return np.flatnonzero(self._counts() == 0)

    def _counts(self) -> Indices:
        return np.bincount(np.concatenate(self.handed_out), minlength=self.num_cells)

    def is_like(self, other: "HandoutRow") -> bool:
        """Return True if the ranks get the same samples in the same order as in another row."""
        return all(map(np.array_equal, self.handed_out, other.handed_out))

    def shares(self) -> str:
        """Return the number of samples per rank: ``"8 each"`` or ``"3 to 5 each"``."""
        sizes = [len(each) for each in self.handed_out]
        low, high = min(sizes), max(sizes)
        return f"{low:,} each" if low == high else f"{low:,} to {high:,} each"


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Handout(Shown):
    """The samples of all ranks: a picture with a cell per sample, a table with a row per rank."""

    title: str
    rows: tuple[HandoutRow, ...]
    """One row for each epoch."""
    notes: tuple[str, ...]
    """Sentences below the picture and the table."""

    def pictures(self) -> list[Picture]:
        """Return a list that contains the picture."""
        return [Picture(draw_handout(self), " ".join([f"{self.title}.", *self.notes]))]

    def table(self) -> Table:
        """Return a table with a row for each rank and a column for each epoch."""
        num_ranks = len(self.rows[0].handed_out)
        shown = [map(_numbers, row.handed_out[:MAX_DRAWN_RANKS]) for row in self.rows]
        ranks = enumerate(zip(*shown, strict=True))
        is_cut = num_ranks > MAX_DRAWN_RANKS
        rest = [f"The table shows {MAX_DRAWN_RANKS} of {num_ranks} ranks."] if is_cut else []
        return Table(
            caption=self.title,
            columns=(
                Column(title="samples"),
                *(Column(title=row.label, is_prose=True) for row in self.rows),
            ),
            rows=tuple(table_row(f"rank {rank}", *cells) for rank, cells in ranks),
            notes=(*rest, *self.notes),
        )


def _numbers(indices: Indices) -> str:
    """Return a text with a rank's first indices, and the number of indices that are left out."""
    shown = " ".join(map(str, indices[:MAX_LISTED]))
    num_more = len(indices) - MAX_LISTED
    return shown if num_more <= 0 else f"{shown} ... ({num_more:,} more)"


def handout_of(spec: SamplerSpec, found: Sequence[RankSamples]) -> Handout:
    """Return a ``Handout`` with the samples that the ranks' samplers returned."""
    kind = found[0].kind
    seen = [int(epoch.max(initial=0)) + 1 for each in found for epoch in each.epochs]
    num_samples = max(*seen, *(each.num_samples for each in found))
    rows = []
    for number in range(spec.num_epochs):
        handed_out = tuple(each.epochs[number] for each in found)
        rows.append(
            HandoutRow(label=f"epoch {number}", num_cells=num_samples, handed_out=handed_out)
        )
    how = f"{'shuffled' if spec.shuffle else 'in order'}{', drop_last' * spec.drop_last}"
    return Handout(
        title=f"{spec.expression or kind}: {counted(num_samples, 'sample')} over "
        f"{counted(len(found), 'rank')}, {f'by its {kind}' if spec.expression else how}",
        rows=tuple(rows),
        notes=tuple(_sampler_notes(spec, found, rows)),
    )


def _sampler_notes(
    spec: SamplerSpec, found: Sequence[RankSamples], rows: Sequence[HandoutRow]
) -> list[str]:
    notes, first = [], rows[0]
    kinds = dict.fromkeys(each.kind for each in found)
    if len(kinds) > 1:
        notes.append(f"The ranks have different samplers: {listed(list(kinds))}.")
    whole = np.sort(first.handed_out[0])
    if len(found) > 1 and all(np.array_equal(np.sort(e), whole) for e in first.handed_out):
        notes.append(
            f"Every rank gets the same samples, so they do the same work {len(found)} times. "
            "Use a DistributedSampler to share the samples between the ranks."
        )
    elif len(found) > 1 and (num := len(first.repeated())):
        why = "padding gives all ranks the same number of samples"
        if not found[0].has_set_epoch:
            why = "each rank draws samples independently. A DistributedSampler avoids this"
        notes.append(f"Used more than once: {counted(num, 'sample')}, because {why}.")
    if num := len(first.absent()):
        notes.append(f"Not used by any rank in {first.label}: {counted(num, 'sample')}.")
    if not found[0].has_set_epoch:
        notes.append("The sampler has no set_epoch. If it shuffles, the next epoch may differ.")
    elif len(rows) > 1 and all(row.is_like(first) for row in rows):
        why = "your code must call set_epoch(epoch)" if spec.shuffle else "there is no shuffling"
        if spec.expression:
            why = "it does not shuffle, or your code has not called its set_epoch(epoch) yet"
        notes.append(f"Every epoch is the same: {why}.")
    return notes


# -- the picture ---------------------------------------------------------------------------


def draw_handout(handout: Handout) -> "Figure":
    """Return a figure with a row for each epoch.  The colour of a sample's cell shows its rank."""
    rows = handout.rows
    num_columns = min(max(row.num_cells for row in rows), MAX_CELLS)
    num_ranks = len(rows[0].handed_out)
    key = "Numbers are ranks.  A pale sample is used more than once.  A sample with × is not used."
    height = SAMPLES_HEIGHT * len(rows)
    sheet = Sheet(handout.title, height + TICKS, [key])
    axes = sheet.axes(height, left=LABELS)
    axes.set(xlim=(0, WIDTH - LABELS - RIGHT), ylim=(height, 0))
    axes.axis("off")
    look: Look = {"points": POINTS, "colour": MUTED}
    width = min((WIDTH - LABELS - SUMMARIES) / num_columns, MAX_CELL)
    for number, row in enumerate(rows):
        middle = (number + 0.5) * SAMPLES_HEIGHT
        write_label(axes, -0.15, middle, row.label, ha="right", **look)
        for column, owners in enumerate(row.owners().values()):
            _draw_cell(axes, column * width, middle, width, owners)
        place = min(row.num_cells, MAX_CELLS) * width + 0.15
        counts = ((len(row.repeated()), "repeated"), (len(row.absent()), "left out"))
        summary = [row.shares(), *(f"{num:,} {what}" for num, what in counts if num)]
        more = "… " if row.num_cells > MAX_CELLS else ""
        write_label(axes, place, middle, more + ", ".join(summary), **look)
    below = height + 0.16
    write_label(axes, -0.15, below, "sample", ha="right", **look)
    for cell in range(0, num_columns, 1 if num_columns <= 24 else 5):
        write_label(axes, (cell + 0.5) * width, below, f"{cell}", ha="center", **look)
    if num_ranks <= len(RANK_COLOURS):
        legend(axes, {f"rank {rank}": rank_colour(rank) for rank in range(num_ranks)})
    return sheet.figure


def _draw_cell(
    axes: "Axes", left: float, middle: float, width: float, owners: Sequence[int]
) -> None:
    """Draw a cell in its rank's colour, pale if it has several ranks, dashed if it has no rank."""
    colour = rank_colour(owners[0]) if len(owners) == 1 else RULE if owners else PAPER
    text = ",".join(map(str, owners)) if len(owners) <= 2 else f"{len(owners)}×"
    x, wide, high = left + GAP, width - 2 * GAP, SAMPLES_HEIGHT - 4 * GAP
    rim: Look = {"linewidth": 0}
    if not owners:
        text, rim = "×", {"edgecolor": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2))}
    axes.bar(x, high, wide, middle - high / 2, color=colour, align="edge", **rim)
    look: Look = {"points": min(POINTS, wide * 92 / len(text)), "colour": ink_on(colour)}
    write_label(axes, left + width / 2, middle, text, ha="center", **look)
