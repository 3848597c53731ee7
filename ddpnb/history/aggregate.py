"""The curve, tracks and totals of a run, whose size is bounded however long it trains.  (Kernel.)

Neighbouring entries of a series are merged into bins, always a power of two of them.  When there
are too many bins, each two become one: points already drawn stay where they are, or join their
neighbour.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpnb.history.align import AlignedUpdates, StepAligner, make_aligner
from ddpnb.history.database import Floats, Records
from ddpnb.protocol.messages import NO_STALENESS, Parts, RunHeader, RunSpec

MAX_POINTS = 360
"""The most points of a curve: at least one for every other pixel of its panel."""

MAX_RANK_POINTS = 120
"""The most points of a rank's track."""

MAX_STALENESS = 1023
"""Greater staleness counts as this."""

NUM_RECENT = 20
"""Losses in ``RunAggregate.recent_loss``."""

PARTS = Parts._fields
COMPUTED = ("data", "forward", "backward", "optimizer")
"""The parts of a step that do not depend on other ranks."""


def _nothing() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The updates of a run, all workers together, downsampled; arrays of equal length.

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
    """Updates with a NaN or infinite loss."""
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
    """Mean time of a step's ``COMPUTED`` parts at each point; without parts, of the whole step."""


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
    """Aggregates the rows of a run as they arrive; ``snapshot`` costs the same at any length.

    One thread may add while others take snapshots: these are made of arrays that are replaced,
    never written to.

    Args:
        spec: what is trained; None for a hand-written loop.
        num_ranks: how many ranks may log from a hand-written loop.
    """

    def __init__(self, spec: RunSpec | None, num_ranks: int = 1) -> None:
        self._spec = spec
        self._num_ranks = num_ranks
        self._aligner: StepAligner | None = None
        self._waiting_for_header: list[Records] = []
        self._curve = Downsampler(num_sums=3, num_minima=1, num_maxima=3, max_bins=MAX_POINTS)
        self._ranks: dict[int, _RankAggregator] = {}
        self._samples = self._seconds = 0.0
        self._num_events = self._num_samples = self._num_diverged = 0
        self._latest_seconds = 0.0
        self._staleness = np.zeros(0, dtype=np.int64)
        self._recent = np.empty(0)
        self._snapshot: RunAggregate | None = RunAggregate()

    @classmethod
    def from_all(
        cls, rows: Records, spec: RunSpec | None, header: RunHeader | None
    ) -> "RunAggregator":
        """Return the aggregator of a complete run; ``rows`` of any ranks, in any order."""
        made = cls(spec)
        made._aligner = make_aligner(header, spec)
        made._aligner.end()
        made.add(rows)
        return made

    @property
    def is_in_order(self) -> bool:
        """Whether the result is that of ``from_all``: no rank reported a step too late."""
        return self._aligner is None or self._aligner.is_in_order

    def add(self, rows: Records, header: RunHeader | None = None) -> None:
        """Add rows of one rank, in the order of its steps."""
        if header is not None or self._spec is None:
            self._align_by(header)
        if len(rows):
            self._count(rows)
            if self._aligner is None:
                self._waiting_for_header.append(rows)
            else:
                self._add_updates(self._aligner.add(rows))
        self._snapshot = None

    def end(self) -> None:
        """Stop waiting for ranks that have not reported a step."""
        self._add_updates(self._align_by(None).end())
        self._snapshot = None

    def snapshot(self) -> RunAggregate:
        """Return the run as it is now."""
        made = self._snapshot
        if made is None:
            made = RunAggregate(
                num_events=self._num_events,
                num_samples=self._num_samples,
                seconds=self._latest_seconds,
                num_diverged=self._num_diverged,
                curve=_curve_of(self._curve.snapshot()),
                ranks=tuple(rank.snapshot() for _, rank in sorted(self._ranks.items())),
                staleness=self._staleness,
                recent_loss=float(self._recent.mean()) if len(self._recent) else float("nan"),
            )
            self._snapshot = made
        return made

    def _align_by(self, header: RunHeader | None) -> StepAligner:
        """Return the run's aligner; the first call makes it, as the header says."""
        if self._aligner is None:
            self._aligner = make_aligner(header, self._spec, self._num_ranks)
            for early in self._waiting_for_header:
                self._add_updates(self._aligner.add(early))
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

    def _add_updates(self, updates: AlignedUpdates) -> None:
        for rank in np.unique(updates.rows["rank"]).tolist():
            own = updates.rows[updates.rows["rank"] == rank]
            self._ranks.setdefault(rank, _RankAggregator(rank)).add(own)
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
            minima=loss[None],
            maxima=np.stack([samples, seconds, loss]),
        )


@final
class _RankAggregator:
    """Aggregates the rows of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_steps = self._num_samples = self._num_bytes = 0
        self._parts = np.zeros(len(PARTS))
        self._seconds = 0.0
        self._track = Downsampler(num_sums=1, num_minima=0, num_maxima=1, max_bins=MAX_RANK_POINTS)

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

    def snapshot(self) -> RankAggregate:
        track = self._track.snapshot()
        num_steps = np.full(track.sums.shape[1], float(track.num_merged))
        if len(num_steps):
            num_steps[-1] = track.num_entries - track.num_merged * (len(num_steps) - 1)
        return RankAggregate(
            rank=self._rank,
            num_steps=self._num_steps,
            num_samples=self._num_samples,
            seconds=self._seconds,
            parts=Parts(*self._parts.tolist()),
            num_bytes_sent=self._num_bytes,
            at_seconds=track.maxima[0],
            own_seconds=track.sums[0] / num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DownsampledSeries:
    """A series at one moment, in bins; each array is of shape ``[columns, bins]``."""

    sums: Floats
    minima: Floats
    maxima: Floats
    num_merged: int = 1
    """Entries in each bin but the last, which may have fewer."""
    num_entries: int = 0


@final
class Downsampler:
    """Merges the entries of a growing series into at most ``max_bins`` bins.

    Args:
        num_sums: columns that are added up in a bin.
        num_minima: columns of which a bin has the least value.
        num_maxima: columns of which a bin has the greatest value; of what only grows, the last.
        max_bins: if there are more, each two become one.
    """

    def __init__(self, *, num_sums: int, num_minima: int, num_maxima: int, max_bins: int) -> None:
        self._max_bins = max_bins
        self._series = DownsampledSeries(
            sums=np.empty((num_sums, 0)),
            minima=np.empty((num_minima, 0)),
            maxima=np.empty((num_maxima, 0)),
        )

    def extend(self, sums: Floats, minima: Floats, maxima: Floats) -> None:
        """Append entries; each array is of shape ``[columns, entries]``, NaN where unknown."""
        num_new = sums.shape[1]
        if num_new == 0:
            return
        old = self._series
        num_in_last = old.num_entries % old.num_merged  # 0 if the last bin is full
        num_full = old.sums.shape[1] - (num_in_last > 0)
        bin_of = (num_in_last + np.arange(num_new)) // old.num_merged
        if num_in_last:
            sums, minima, maxima = (
                np.concatenate([before[:, num_full:], new], axis=1)
                for before, new in ((old.sums, sums), (old.minima, minima), (old.maxima, maxima))
            )
            bin_of = np.concatenate([[0], bin_of])
        starts = np.flatnonzero(np.diff(bin_of, prepend=-1))
        merged = _merged(sums, minima, maxima, starts)
        self._series = DownsampledSeries(
            sums=np.concatenate([old.sums[:, :num_full], merged[0]], axis=1),
            minima=np.concatenate([old.minima[:, :num_full], merged[1]], axis=1),
            maxima=np.concatenate([old.maxima[:, :num_full], merged[2]], axis=1),
            num_merged=old.num_merged,
            num_entries=old.num_entries + num_new,
        )
        while self._series.sums.shape[1] > self._max_bins:
            self._halve()

    def snapshot(self) -> DownsampledSeries:
        """Return the series as it is now; later entries do not change it."""
        return self._series

    def _halve(self) -> None:
        now = self._series
        starts = np.arange(0, now.sums.shape[1], 2)
        sums, minima, maxima = _merged(now.sums, now.minima, now.maxima, starts)
        self._series = DownsampledSeries(
            sums=sums,
            minima=minima,
            maxima=maxima,
            num_merged=2 * now.num_merged,
            num_entries=now.num_entries,
        )


def _merged(
    sums: Floats, minima: Floats, maxima: Floats, starts: NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Merge the columns' entries from each start to the next; NaN counts as unknown."""
    return (
        np.add.reduceat(sums, starts, axis=1),
        np.fmin.reduceat(minima, starts, axis=1),
        np.fmax.reduceat(maxima, starts, axis=1),
    )


def _curve_of(series: DownsampledSeries) -> Curve:
    with np.errstate(invalid="ignore"):
        loss = series.sums[0] / series.sums[1]
    return Curve(
        samples=series.maxima[0],
        seconds=series.maxima[1],
        loss=loss,
        lowest=series.minima[0],
        highest=series.maxima[2],
        num_bad=series.sums[2],
        num_merged=series.num_merged,
        num_updates=series.num_entries,
    )
