"""One run: the steps that have arrived, and a snapshot to draw.  (Kernel.)"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpnb.history.curve import Curve, complete_steps, curve_of, with_waiting
from ddpnb.history.rows import Floats, Records, metrics_of, rows_of, stacked, with_metrics
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import (
    NO_PARTS,
    NO_STALENESS,
    Evaluating,
    EventBatch,
    Mark,
    MarkKind,
    Parts,
    RunHeader,
    RunReport,
    RunSpec,
)

MAX_ROWS_IN_MEMORY = 20_000
"""The steps of a longer run are in the store alone."""

COMPUTED = ("data", "forward", "backward", "optimizer")
"""The parts of a step that do not depend on other ranks."""


Absences = Mapping[int, Sequence[tuple[float, float]]]
"""Periods, in training seconds, without each rank; a rank that was never absent is left out."""


class Status(StrEnum):
    """The state of a run; equal to its own text, e.g. ``"failed"``."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


def ending(status: Status, detail: str) -> str:
    """Return how a run ended and why, e.g. ``"stopped: interrupted"``."""
    if detail.startswith(status.value):
        return detail  # "stopped by the user"
    return f"{status.value}: {detail}" if detail else status.value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTotals:
    """The steps of one rank, all together."""

    rank: int
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    """Training time at the end of its last step."""
    parts: Parts = field(default_factory=Parts)
    num_bytes_sent: int = 0
    track: Curve = field(default_factory=Curve)
    """The time of a step's ``COMPUTED`` parts; without parts, of the whole step."""


def _no_counts() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSnapshot:
    """A run at one moment: plots, tables and the store read it.

    What is measured of it follows from its steps; while it trains, from those steps of synchronous
    ranks that all have reported.
    """

    run_id: str
    name: str
    """The strategy, or the name of a hand-written loop."""
    comparison: str = ""
    """Name of its comparison; speed-up is measured within one."""
    created: float = field(default_factory=time.time)
    """Seconds since 1970 (UTC)."""
    spec: RunSpec | None = None
    """None for a hand-written loop logged with ``ddpnb.log``."""
    header: RunHeader | None = None
    status: Status = Status.RUNNING
    detail: str = ""
    """Why it failed or stopped, in one clause."""
    num_bad: int = 0
    """Losses that are NaN or infinite."""
    staleness: NDArray[np.int64] = field(default_factory=_no_counts)
    """How many updates had staleness 0, 1, 2 ..."""
    curve: Curve = field(default_factory=Curve)
    """The loss."""
    metric_curves: Mapping[str, Curve] = field(default_factory=dict)
    """The further numbers that the user logged."""
    ranks: tuple[RankTotals, ...] = ()
    load: Callable[[], Records] = lambda: stacked(())
    """Returns its steps as they arrived: from memory, or from the store if they are many."""
    reports: tuple[RunReport, ...] = ()
    marks: tuple[Mark, ...] = ()
    """In order of arrival."""
    evaluating: Evaluating | None = None
    """How far its models have been judged; None: not begun, or not known."""
    num_lost_batches: int = 0

    @property
    def num_events(self) -> int:
        """Steps of all workers."""
        return sum(rank.num_steps for rank in self.ranks)

    @property
    def num_samples(self) -> int:
        """Samples that all workers have trained on."""
        return sum(rank.num_samples for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Training seconds of the rank that has come furthest."""
        return max((rank.seconds for rank in self.ranks), default=0.0)

    @property
    def repeat(self) -> int:
        """0 for the first run of this name in its comparison."""
        return 0 if self.spec is None else self.spec.repeat

    @property
    def is_running(self) -> bool:
        """Whether more steps may come."""
        return self.status is Status.RUNNING

    @property
    def num_diverged(self) -> int:
        """How many losses are infinite, or NaN although others were logged."""
        never_logged = self.spec is None and self.num_bad == self.num_events
        return 0 if never_logged else self.num_bad

    def reported(self, name: str) -> float:
        """Return the first number of this name in the ranks' reports; NaN if there is none."""
        values = [getattr(report, name) for report in self.reports]
        return next((value for value in values if not math.isnan(value)), math.nan)

    @property
    def is_ceiling(self) -> bool:
        """Whether its ranks stop after the same time, and not after the same step."""
        return self.spec is not None and self.spec.is_ceiling

    @property
    def events(self) -> Records:
        """One row per step, read-only, in order of arrival; a long run is read again each time.

        Of a run that is over, the last step of each rank ends with what followed it.
        """
        rows = self.load()
        rows = rows if self.is_running else _with_ends(rows, self.reports)
        rows.flags.writeable = False
        return rows


@final
class Run:
    """Assembles the steps of one run; a snapshot is cheap and never changes.

    While it trains, asynchronous steps are taken as they arrive, and synchronous ones once every
    rank has reported them.  When it has ended, all is computed from all of its steps.

    Args:
        stored: reads the steps from the store; None: all stay in memory.
        known: the fields of ``RunSnapshot`` that are known before the first step.
    """

    def __init__(self, *, stored: Callable[[], Records] | None = None, **known: Any) -> None:
        self._now = RunSnapshot(**known)
        self._stored = stored
        self._is_settled = False
        self._rows: list[Records] | None = []
        """All steps, until there are too many."""
        self._new: list[Records] = []
        """Those that are not in the snapshot."""
        self._num_batches = 0
        self._num_sent: dict[int, int] = {}
        """Batches of each rank, as far as they are numbered or reported."""
        self._lock = threading.Lock()  # one thread adds, others take snapshots

    @property
    def run_id(self) -> str:
        """The id in its batches and reports."""
        return self._now.run_id

    def add(self, batch: EventBatch) -> None:
        """Add a batch."""
        assert batch.run_id == self.run_id, (batch.run_id, self.run_id)
        with self._lock:
            self._num_batches += 1
            self._expect(batch.rank, batch.sequence + 1)
            rows = rows_of(batch)
            self._new.append(rows)
            if self._rows is not None:
                self._rows.append(rows)
            self._set(
                header=batch.header or self._now.header,
                marks=self._now.marks + batch.marks,
                evaluating=batch.evaluating or self._now.evaluating,
            )

    def add_report(self, report: RunReport) -> None:
        """Add the report of a rank; batches that it sent and that have not come count as lost."""
        assert report.run_id == self.run_id, (report.run_id, self.run_id)
        with self._lock:
            self._expect(report.rank, report.num_batches_sent)
            reports = [each for each in self._now.reports if each.rank != report.rank]
            self._set(reports=tuple(sorted([*reports, report], key=lambda each: each.rank)))

    def end(self, status: Status, detail: str = "") -> None:
        """Set how the run ended; may be called again."""
        with self._lock:
            self._set(status=Status(status), detail=detail)

    def snapshot(self) -> RunSnapshot:
        """Return the run as it is now; costs the same however long it trains."""
        with self._lock:
            if not self._is_settled:
                lost = sum(self._num_sent.values()) - self._num_batches
                now = replace(self._now, num_lost_batches=lost)
                self._is_settled = not now.is_running
                now = self._with_new(now) if now.is_running else self._settled(now)
                self._now = replace(now, load=self._steps())
            return self._now

    def _steps(self) -> Callable[[], Records]:
        """Return what returns all steps; many of them leave memory."""
        if self._rows is not None:
            rows = stacked(self._rows)
            self._rows = [rows]
            if self._stored is None or len(rows) <= MAX_ROWS_IN_MEMORY:
                return lambda: rows
            self._rows = None
        assert self._stored is not None
        return self._stored

    def _with_new(self, now: RunSnapshot) -> RunSnapshot:
        """Return the run with the steps that have come: of synchronous ones those complete."""
        header, rows = now.header, stacked(self._new)
        if len(rows) == 0 or (header is None and now.spec is not None and now.is_running):
            return now
        is_due = np.ones(len(rows), dtype=bool)
        if header is not None and header.synchronous and now.is_running:
            is_due = complete_steps(rows, header.num_ranks or header.num_workers)
        self._new = [rows[~is_due]]
        return _measured(now, rows[is_due])

    def _settled(self, now: RunSnapshot) -> RunSnapshot:
        """Return the run measured anew by all of its steps, if they can be read."""
        rows = stacked(())
        with contextlib.suppress(UserError):
            rows = replace(now, load=self._steps()).events
        if len(rows) < now.num_events + sum(map(len, self._new)):
            return self._with_new(now)
        self._new = []
        now = replace(now, num_bad=0, ranks=(), staleness=_no_counts())
        now = _measured(replace(now, curve=Curve(), metric_curves={}), rows)
        if now.is_ceiling:  # steps that only the faster ranks made are none
            complete = rows[complete_steps(rows, len(now.ranks))]
            now = replace(now, curve=curve_of(complete, now.header))
        return now

    def _set(self, **changes: Any) -> None:
        """Change the run; the next snapshot is measured anew."""
        self._now = replace(self._now, **changes)
        self._is_settled = False

    def _expect(self, rank: int, num_batches: int) -> None:
        """Note that a rank has sent so many batches at least."""
        self._num_sent[rank] = max(self._num_sent.get(rank, 0), num_batches)


def _with_ends(rows: Records, reports: tuple[RunReport, ...]) -> Records:
    """Return a copy in which each rank's last step ends when its report says the rank did."""
    rows = rows.copy()
    for report in reports:
        own = np.flatnonzero(rows["rank"] == report.rank)
        if len(own) and report.seconds > rows["seconds"][own].max():  # it may be NaN
            rows["seconds"][own[np.argmax(rows["seconds"][own])]] = report.seconds
    return rows


def _measured(run: RunSnapshot, rows: Records) -> RunSnapshot:
    """Return a run with more steps in its curves, its counts and the totals of its ranks."""
    if len(rows) == 0:
        return run
    is_bad = ~np.isfinite(rows["loss"])
    if run.spec is not None:  # a worker whose share of a step is empty has no loss
        is_bad &= rows["num_samples"] > 0
    known = rows["staleness"][rows["staleness"] != NO_STALENESS]
    counts = np.bincount(known, minlength=len(run.staleness))
    counts[: len(run.staleness)] += run.staleness
    rows = with_metrics(rows, dict.fromkeys([*run.metric_curves, *metrics_of(rows)]))
    curves = {
        name: curve_of(rows, run.header, field, after=run.metric_curves.get(name, _unlogged(run)))
        for name, field in metrics_of(rows).items()
    }
    timed = with_waiting(rows) if run.header is not None and run.header.synchronous else rows
    ranks = {rank.rank: rank for rank in run.ranks}
    for rank in np.unique(rows["rank"]).tolist():
        before = ranks.get(rank, RankTotals(rank=rank))
        ranks[rank] = _with_steps(before, timed[timed["rank"] == rank])
    return replace(
        run,
        num_bad=run.num_bad + int(np.count_nonzero(is_bad)),
        staleness=counts,
        curve=curve_of(rows, run.header, after=run.curve),
        metric_curves=curves,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
    )


def _unlogged(run: RunSnapshot) -> Curve:
    """Return the curve so far of a number that has not been logged yet."""
    unknown = np.full(len(run.curve), np.nan)
    return replace(
        run.curve, mean=unknown, lowest=unknown, highest=unknown, weight=np.zeros(len(unknown))
    )


def _with_steps(before: RankTotals, rows: Records) -> RankTotals:
    """Return the totals of a rank with more of its steps."""
    rows = rows[np.argsort(rows["seconds"], kind="stable")]
    parts = {name: rows[name].astype(np.float64) for name in Parts._fields}
    own = np.sum([parts[name] for name in COMPUTED], axis=0)
    if not any(part.any() for part in parts.values()):
        own = np.diff(rows["seconds"], prepend=before.seconds)
    return RankTotals(
        rank=before.rank,
        num_steps=before.num_steps + len(rows),
        num_samples=before.num_samples + int(rows["num_samples"].sum()),
        seconds=max(before.seconds, float(rows["seconds"][-1])),
        parts=Parts(
            *(old + float(new.sum()) for old, new in zip(before.parts, parts.values(), strict=True))
        ),
        num_bytes_sent=before.num_bytes_sent + int(rows["num_bytes_sent"].sum()),
        track=before.track.extended(own, np.ones(len(own)), rows["seconds"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The mean step of a strategy; seconds of one worker."""

    parts: Parts = NO_PARTS
    num_bytes_sent: float = math.nan
    """What one worker sent in one step."""

    @property
    def seconds(self) -> float:
        """The whole step; hidden communication takes no time of its own."""
        return sum(self.parts) - self.parts.hidden

    @property
    def is_known(self) -> bool:
        """Whether the ranks reported any part."""
        return self.seconds > 0

    @property
    def exposed_share(self) -> float:
        """Share of the step spent on exchanging tensors or waiting for other ranks."""
        if not self.is_known:
            return math.nan
        return (self.parts.communication + self.parts.waiting) / self.seconds


def step_split(runs: Sequence[RunSnapshot]) -> StepSplit:
    """Return the mean step over all ranks and repeats."""
    ranks = [rank for run in runs for rank in run.ranks if rank.num_steps]
    num_steps = sum(rank.num_steps for rank in ranks)
    if num_steps == 0:
        return StepSplit()
    totals = np.sum([rank.parts for rank in ranks], axis=0) / num_steps
    sent = sum(rank.num_bytes_sent for rank in ranks)
    return StepSplit(
        parts=Parts(*totals.tolist()), num_bytes_sent=sent / num_steps if sent else math.nan
    )


def slowness(ranks: Sequence[RankTotals]) -> dict[int, float]:
    """Return each rank's own time of a step over that of the fastest rank."""
    means = {rank.rank: float(np.nanmedian(rank.track.mean)) for rank in ranks if len(rank.track)}
    fastest = min(means.values(), default=0.0)
    return {rank: mean / fastest for rank, mean in means.items()} if fastest > 0 else {}


def absences(run: RunSnapshot) -> Absences:
    """Return when ranks that died were absent; one that is still absent is so to infinity."""
    periods: dict[int, list[tuple[float, float]]] = {}
    steps = {rank.rank: rank.track.seconds for rank in run.ranks}
    for mark in sorted(run.marks, key=lambda mark: mark.seconds):
        own = periods.get(mark.rank, [])
        is_absent = bool(own) and math.isinf(own[-1][1])
        if mark.kind in (MarkKind.KILLED, MarkKind.DIED) and not is_absent:
            before = [at for at in steps.get(mark.rank, ()) if at <= mark.seconds]
            periods[mark.rank] = [*own, (max(before, default=0.0), math.inf)]
        elif mark.kind is MarkKind.CAME_BACK and is_absent:
            own[-1] = _longest_pause(steps.get(mark.rank, np.empty(0)), own[-1][0], mark.seconds)
    return periods


def _longest_pause(at_seconds: Floats, begin: float, end: float) -> tuple[float, float]:
    """Return the longest time between two steps of a rank, as marks may come a little late."""
    within = at_seconds[(begin < at_seconds) & (at_seconds < end)]
    at = np.concatenate([[begin], within, [end]])
    longest = int(np.argmax(np.diff(at)))
    return float(at[longest]), float(at[longest + 1])
