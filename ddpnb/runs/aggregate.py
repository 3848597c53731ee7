"""What of a run is kept for drawing and counting, however long it gets?  (Notebook side.)

Its loss curve, a coarser track of each rank, and totals; fed by events as they come.
Neighbours in a series are merged, always a power of two of them.  When there are too many
cells, each two become one: points already drawn stay where they are, or join their neighbour.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.messages import NO_STALENESS, Parts, RunHeader, RunSpec
from ddpnb.runs.align import StepAligner, Updates, aligner_of
from ddpnb.runs.rows import Floats, Records

MAX_POINTS = 360
"""No curve has more points than this: at least every other pixel of its panel has one."""

MAX_RANK_POINTS = 120
"""No rank's track has more than this."""

MAX_STALENESS = 1023
"""Greater staleness counts as this."""

NUM_RECENT = 20

PARTS = Parts._fields
COMPUTED = ("data", "forward", "backward", "optimizer")
"""The parts of a step that do not depend on other ranks."""


def _nothing() -> Floats:
    return np.empty(0)


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
class Downsampler:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The updates of a run, all workers together, thinned; arrays of equal length.

    Each point stands for ``num_merged`` updates and sits at the end of them.
    """

    samples: Floats = field(default_factory=_nothing)
    """Samples seen by all workers together, these updates included."""
    seconds: Floats = field(default_factory=_nothing)
    """Training seconds at the end of the updates; never falls."""
    loss: Floats = field(default_factory=_nothing)
    """Mean over the updates that are finite, weighted by samples; NaN if none is."""
    lowest: Floats = field(default_factory=_nothing)
    highest: Floats = field(default_factory=_nothing)
    num_bad: Floats = field(default_factory=_nothing)
    """Updates whose loss was NaN or infinite."""
    num_merged: int = 1
    num_updates: int = 0

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def updates(self) -> Floats:
        """Updates made up to each point."""
        made: Floats = np.minimum(
            np.arange(1.0, len(self) + 1) * self.num_merged, float(self.num_updates)
        )
        return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAggregate:
    """One rank of a run."""

    rank: int
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    parts: Parts = field(default_factory=Parts)
    """Seconds of all steps together."""
    num_bytes_sent: int = 0
    at_seconds: Floats = field(default_factory=_nothing)
    """When each point of the track ends."""
    own_seconds: Floats = field(default_factory=_nothing)
    """What a step took of this rank's own work at each point; without parts, all it took."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunAggregate:
    """A run at one moment."""

    num_events: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    """Training seconds of the rank that has come furthest."""
    num_diverged: int = 0
    """Losses that were NaN or infinite."""
    curve: Curve = field(default_factory=Curve)
    ranks: tuple[RankAggregate, ...] = ()
    staleness: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """How many updates had staleness 0, 1, 2 ..."""
    recent_loss: float = float("nan")
    """Mean of the latest losses to arrive."""


@final
class RunAggregator:
    """Takes in the rows of a run; ``view`` costs the same at any length.

    One thread may add while others look: a view is made of arrays that are replaced,
    never written to.

    Args:
        spec: what is trained; None for a hand-written loop.
        num_ranks: how many ranks may tell of a hand-written loop.
    """

    def __init__(self, spec: RunSpec | None, num_ranks: int = 1) -> None:
        self._spec = spec
        self._num_ranks = num_ranks
        self._aligner: StepAligner | None = None
        self._waiting_for_header: list[Records] = []
        self._curve = Downsampler(num_sums=3, num_lows=1, num_highs=3, max_cells=MAX_POINTS)
        self._ranks: dict[int, _Rank] = {}
        self._samples = self._seconds = 0.0
        self._num_events = self._num_samples = self._num_diverged = 0
        self._latest_seconds = 0.0
        self._staleness = np.zeros(0, dtype=np.int64)
        self._recent = np.empty(0)
        self._view: RunAggregate | None = RunAggregate()

    @classmethod
    def of_all(
        cls, rows: Records, spec: RunSpec | None, header: RunHeader | None
    ) -> "RunAggregator":
        """Return what all rows of a run come to, of whatever ranks, in whatever order."""
        made = cls(spec)
        made._aligner = aligner_of(header, spec)
        made._aligner.end()
        made.add(rows)
        return made

    @property
    def is_in_order(self) -> bool:
        """Whether it has come to what ``of_all`` would: no rank told of anything too late."""
        return self._aligner is None or self._aligner.is_in_order

    def add(self, rows: Records, header: RunHeader | None = None) -> None:
        """Take in rows of one rank, in the order of its steps."""
        if header is not None or self._spec is None:
            self._joined_by(header)
        if len(rows):
            self._count(rows)
            if self._aligner is None:
                self._waiting_for_header.append(rows)
            else:
                self._take(self._aligner.add(rows))
        self._view = None

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._take(self._joined_by(None).end())
        self._view = None

    def view(self) -> RunAggregate:
        """Return the run as it is now."""
        view = self._view
        if view is None:
            view = RunAggregate(
                num_events=self._num_events,
                num_samples=self._num_samples,
                seconds=self._latest_seconds,
                num_diverged=self._num_diverged,
                curve=_curve_of(self._curve.view()),
                ranks=tuple(rank.view() for _, rank in sorted(self._ranks.items())),
                staleness=self._staleness,
                recent_loss=float(self._recent.mean()) if len(self._recent) else float("nan"),
            )
            self._view = view
        return view

    def _joined_by(self, header: RunHeader | None) -> StepAligner:
        """Return what joins the events, from now on if nothing did; the header says how."""
        if self._aligner is None:
            self._aligner = aligner_of(header, self._spec, self._num_ranks)
            for early in self._waiting_for_header:
                self._take(self._aligner.add(early))
            self._waiting_for_header = []
        return self._aligner

    def _count(self, rows: Records) -> None:
        self._num_events += len(rows)
        self._num_samples += int(rows["num_samples"].sum())
        self._latest_seconds = max(self._latest_seconds, float(rows["seconds"].max()))
        is_bad = ~np.isfinite(rows["loss"])
        if self._spec is not None:  # a worker whose share of a step is empty has no loss
            is_bad &= rows["num_samples"] > 0
        self._num_diverged += int(np.count_nonzero(is_bad))
        self._recent = np.concatenate([self._recent, rows["loss"][-NUM_RECENT:]])[-NUM_RECENT:]
        known = rows["staleness"][rows["staleness"] != NO_STALENESS]
        if len(known):
            counts = np.bincount(np.clip(known, 0, MAX_STALENESS), minlength=len(self._staleness))
            counts[: len(self._staleness)] += self._staleness
            self._staleness = counts

    def _take(self, updates: Updates) -> None:
        for rank in np.unique(updates.rows["rank"]).tolist():
            own = updates.rows[updates.rows["rank"] == rank]
            self._ranks.setdefault(rank, _Rank(rank)).add(own)
        if len(updates.loss) == 0:
            return
        samples = self._samples + np.cumsum(updates.weight)
        seconds = np.maximum.accumulate(np.append(self._seconds, updates.seconds))[1:]
        self._samples, self._seconds = float(samples[-1]), float(seconds[-1])
        is_finite = np.isfinite(updates.loss)
        loss = np.where(is_finite, updates.loss, np.nan)
        weight = np.where(is_finite, np.where(updates.weight > 0, updates.weight, 1.0), 0.0)
        self._curve.extend(
            sums=np.stack([np.where(is_finite, updates.loss, 0.0) * weight, weight, ~is_finite]),
            lows=loss[None],
            highs=np.stack([samples, seconds, loss]),
        )


def _curve_of(cells: Cells) -> Curve:
    with np.errstate(invalid="ignore"):
        loss = cells.sums[0] / cells.sums[1]
    return Curve(
        samples=cells.highs[0],
        seconds=cells.highs[1],
        loss=loss,
        lowest=cells.lows[0],
        highest=cells.highs[2],
        num_bad=cells.sums[2],
        num_merged=cells.num_merged,
        num_updates=cells.num_entries,
    )


@final
class _Rank:
    """Adds up what one rank tells."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_steps = self._num_samples = self._num_bytes = 0
        self._parts = np.zeros(len(PARTS))
        self._seconds = 0.0
        self._track = Downsampler(num_sums=1, num_lows=0, num_highs=1, max_cells=MAX_RANK_POINTS)

    def add(self, rows: Records) -> None:
        parts = np.stack([rows[name].astype(np.float64) for name in PARTS])
        seconds = np.maximum.accumulate(np.append(self._seconds, rows["seconds"]))
        own = parts[[PARTS.index(name) for name in COMPUTED]].sum(axis=0)
        if not parts.any():
            own = np.diff(seconds)
        self._track.extend(own[None], np.empty((0, len(rows))), seconds[None, 1:])
        self._seconds = float(seconds[-1])
        self._parts = self._parts + parts.sum(axis=1)
        self._num_steps += len(rows)
        self._num_samples += int(rows["num_samples"].sum())
        self._num_bytes += int(rows["num_bytes_sent"].sum())

    def view(self) -> RankAggregate:
        cells = self._track.view()
        done = np.full(cells.sums.shape[1], float(cells.num_merged))
        if len(done):
            done[-1] = cells.num_entries - cells.num_merged * (len(done) - 1)
        return RankAggregate(
            rank=self._rank,
            num_steps=self._num_steps,
            num_samples=self._num_samples,
            seconds=self._seconds,
            parts=Parts(*self._parts.tolist()),
            num_bytes_sent=self._num_bytes,
            at_seconds=cells.highs[0],
            own_seconds=cells.sums[0] / done,
        )
