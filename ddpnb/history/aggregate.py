"""The curve, tracks and totals of a run, whose size is bounded however long it trains.  (Kernel.)

Neighbouring entries of a series are merged into bins, always a power of two of them.  When there
are too many bins, each two become one: points already drawn stay where they are, or join their
neighbour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
        self._curve = Downsampler(
            *(np.add, np.add, np.add, np.fmin, np.fmax, np.fmax, np.fmax), max_bins=MAX_POINTS
        )
        self._ranks: dict[int, _RankAggregator] = {}
        self._samples = self._seconds = 0.0
        self._totals = RunAggregate()
        self._recent = np.empty(0)

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

    def end(self) -> None:
        """Stop waiting for ranks that have not reported a step."""
        self._add_updates(self._align_by(None).end())

    def snapshot(self) -> RunAggregate:
        """Return the run as it is now."""
        ranks = tuple(aggregator.now for _, aggregator in sorted(self._ranks.items()))
        return replace(self._totals, curve=_curve_of(self._curve.series), ranks=ranks)

    def _align_by(self, header: RunHeader | None) -> StepAligner:
        """Return the run's aligner; the first call makes it, as the header says."""
        if self._aligner is None:
            self._aligner = make_aligner(header, self._spec, self._num_ranks)
            for early in self._waiting_for_header:
                self._add_updates(self._aligner.add(early))
            self._waiting_for_header = []
        return self._aligner

    def _count(self, rows: Records) -> None:
        is_bad = ~np.isfinite(rows["loss"])
        if self._spec is not None:  # a worker whose share of a step is empty has no loss
            is_bad &= rows["num_samples"] > 0
        self._recent = np.concatenate([self._recent, rows["loss"][-NUM_RECENT:]])[-NUM_RECENT:]
        before, staleness = self._totals, self._totals.staleness
        known = rows["staleness"][rows["staleness"] != NO_STALENESS]
        if len(known):
            counts = np.bincount(np.clip(known, 0, MAX_STALENESS), minlength=len(staleness))
            counts[: len(staleness)] += staleness
            staleness = counts
        self._totals = RunAggregate(
            num_events=before.num_events + len(rows),
            num_samples=before.num_samples + int(rows["num_samples"].sum()),
            seconds=max(before.seconds, float(rows["seconds"].max())),
            num_diverged=before.num_diverged + int(np.count_nonzero(is_bad)),
            staleness=staleness,
            recent_loss=float(self._recent.mean()),
        )

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
        weighted = np.where(is_finite, updates.loss, 0.0) * weight
        self._curve.extend([weighted, weight, ~is_finite, loss, samples, seconds, loss])


def _curve_of(series: "DownsampledSeries") -> Curve:
    weighted, weight, num_bad, lowest, samples, seconds, highest = series.columns
    with np.errstate(invalid="ignore"):
        loss = weighted / weight
    return Curve(
        samples=samples,
        seconds=seconds,
        loss=loss,
        lowest=lowest,
        highest=highest,
        num_bad=num_bad,
        num_merged=series.num_merged,
        num_updates=series.num_entries,
    )


@final
class _RankAggregator:
    """Aggregates the rows of one rank."""

    def __init__(self, rank: int) -> None:
        self.now = RankAggregate(rank=rank)
        self._track = Downsampler(np.add, np.fmax, max_bins=MAX_RANK_POINTS)

    def add(self, rows: Records) -> None:
        before = self.now
        parts = np.stack([rows[name].astype(np.float64) for name in PARTS])
        seconds = np.maximum.accumulate(np.append(before.seconds, rows["seconds"]))
        own = parts[[PARTS.index(name) for name in COMPUTED]].sum(axis=0)
        self._track.extend([own if parts.any() else np.diff(seconds), seconds[1:]])
        track = self._track.series
        own_sums, at_seconds = track.columns
        num_steps = np.full(len(own_sums), float(track.num_merged))
        num_steps[-1] = track.num_entries - track.num_merged * (len(num_steps) - 1)
        self.now = RankAggregate(
            rank=before.rank,
            num_steps=before.num_steps + len(rows),
            num_samples=before.num_samples + int(rows["num_samples"].sum()),
            seconds=float(seconds[-1]),
            parts=Parts(*(before.parts + parts.sum(axis=1)).tolist()),
            num_bytes_sent=before.num_bytes_sent + int(rows["num_bytes_sent"].sum()),
            at_seconds=at_seconds,
            own_seconds=own_sums / num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DownsampledSeries:
    """A series at one moment, in bins."""

    columns: Floats
    """Of shape ``[columns, bins]``."""
    num_merged: int = 1
    """Entries in each bin but the last, which may have fewer."""
    num_entries: int = 0


@final
class Downsampler:
    """Merges the entries of a growing series into at most ``max_bins`` bins.

    Args:
        merges: how the entries of each column are merged; of what only grows, ``np.fmax`` keeps
            the last.
        max_bins: if there are more, each two become one.
    """

    def __init__(self, *merges: np.ufunc, max_bins: int) -> None:
        self._merges = merges
        self._max_bins = max_bins
        self.series = DownsampledSeries(columns=np.empty((len(merges), 0)))
        """The series as it is now; later entries do not change it."""

    def extend(self, entries: Sequence[Floats]) -> None:
        """Append entries: equally many for each column, NaN where unknown."""
        if len(entries[0]) == 0:
            return
        old = self.series
        num_in_last = old.num_entries % old.num_merged  # 0 if the last bin is full
        num_full = old.columns.shape[1] - (num_in_last > 0)
        bin_of = (num_in_last + np.arange(len(entries[0]))) // old.num_merged
        if num_in_last:
            bin_of = np.append(0, bin_of)
        growing = np.concatenate([old.columns[:, num_full:], np.stack(entries)], axis=1)
        grown = self._merged(growing, np.flatnonzero(np.diff(bin_of, prepend=-1)))
        columns = np.concatenate([old.columns[:, :num_full], grown], axis=1)
        num_merged = old.num_merged
        while columns.shape[1] > self._max_bins:
            columns = self._merged(columns, np.arange(0, columns.shape[1], 2))
            num_merged *= 2
        self.series = DownsampledSeries(
            columns=columns,
            num_merged=num_merged,
            num_entries=old.num_entries + len(entries[0]),
        )

    def _merged(self, columns: Floats, starts: NDArray[np.intp]) -> Floats:
        """Merge the columns' entries from each start to the next."""
        return np.stack(
            [
                merge.reduceat(column, starts)
                for merge, column in zip(self._merges, columns, strict=True)
            ]
        )
