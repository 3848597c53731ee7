"""How does a series that never ends stay small?  (Notebook side.)

Neighbours are merged, always a power of two of them.  When there are too many cells, each
two become one: points already drawn stay where they are, or join their neighbour.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """A series at one moment; each array is of shape ``[columns, cells]``."""

    sums: Floats
    lows: Floats
    highs: Floats
    num_merged: int = 1
    """Entries that each cell stands for, but for the last, which may be of fewer."""
    num_entries: int = 0


@final
class Pyramid:
    """A growing series of at most ``max_cells`` cells.

    Args:
        num_sums: columns that are added up where cells are merged.
        num_lows: columns whose least value is kept.
        num_highs: columns whose greatest value is kept; for what only grows, the last.
        max_cells: after which cells are merged.
    """

    def __init__(self, *, num_sums: int, num_lows: int, num_highs: int, max_cells: int) -> None:
        self._max_cells = max_cells
        self._cells = Cells(
            sums=np.empty((num_sums, 0)),
            lows=np.empty((num_lows, 0)),
            highs=np.empty((num_highs, 0)),
        )

    def extend(self, sums: Floats, lows: Floats, highs: Floats) -> None:
        """Append entries; each array is of shape ``[columns, entries]``, NaN where unknown."""
        num_new = sums.shape[1]
        if num_new == 0:
            return
        old = self._cells
        num_begun = old.num_entries % old.num_merged  # entries in a last cell that has room
        kept = old.sums.shape[1] - (num_begun > 0)
        cell_of = (num_begun + np.arange(num_new)) // old.num_merged
        if num_begun:
            sums, lows, highs = (
                np.concatenate([before[:, kept:], new], axis=1)
                for before, new in ((old.sums, sums), (old.lows, lows), (old.highs, highs))
            )
            cell_of = np.concatenate([[0], cell_of])
        starts = np.flatnonzero(np.diff(cell_of, prepend=-1))
        merged = _merged(sums, lows, highs, starts)
        self._cells = Cells(
            sums=np.concatenate([old.sums[:, :kept], merged[0]], axis=1),
            lows=np.concatenate([old.lows[:, :kept], merged[1]], axis=1),
            highs=np.concatenate([old.highs[:, :kept], merged[2]], axis=1),
            num_merged=old.num_merged,
            num_entries=old.num_entries + num_new,
        )
        while self._cells.sums.shape[1] > self._max_cells:
            self._halve()

    def view(self) -> Cells:
        """Return the series as it is now; later entries do not change it."""
        return self._cells

    def _halve(self) -> None:
        now = self._cells
        starts = np.arange(0, now.sums.shape[1], 2)
        sums, lows, highs = _merged(now.sums, now.lows, now.highs, starts)
        self._cells = Cells(
            sums=sums,
            lows=lows,
            highs=highs,
            num_merged=2 * now.num_merged,
            num_entries=now.num_entries,
        )


def _merged(
    sums: Floats, lows: Floats, highs: Floats, starts: NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Merge the columns' entries from each start to the next; NaN counts as unknown."""
    return (
        np.add.reduceat(sums, starts, axis=1),
        np.fmin.reduceat(lows, starts, axis=1),
        np.fmax.reduceat(highs, starts, axis=1),
    )
