"""Collects a run's steps as they arrive, and returns snapshots.  Runs in the kernel."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.messages import (
    NO_STALENESS,
    Evaluating,
    EventBatch,
    Mark,
    Parts,
    RunHeader,
    RunReport,
    RunSpec,
)
from ddpnb.results.curve import Curve, complete_steps, curve_of, with_waiting
from ddpnb.results.rows import Records, rows_of, stacked

GROWTH = 1 / 200
"""During training, a snapshot is computed again as soon as this share of the steps is new."""

COMPUTED = ("data", "forward", "backward", "optimizer")
"""The parts of a step that do not depend on other ranks."""


class Status(StrEnum):
    """The state of a run.  Each state is equal to a string, such as ``"failed"``."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    UNREADABLE = "unreadable"
    """The run is damaged in the store."""


def ending(status: Status, detail: str) -> str:
    """Return the status and the reason of a run's end, such as ``"stopped: interrupted"``."""
    if detail.startswith(status.value):
        return detail  # "stopped by the user"
    return f"{status.value}: {detail}" if detail else status.value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTotals:
    """Sums over all steps of one rank."""

    rank: int
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    """Training time at the end of the rank's last step."""
    parts: Parts = field(default_factory=Parts)
    num_bytes_sent: int = 0

    @property
    def own_seconds(self) -> float:
        """Mean seconds of a step's ``COMPUTED`` parts, or of the whole step if they are unknown."""
        own = sum(getattr(self.parts, name) for name in COMPUTED) or self.seconds
        return own / max(self.num_steps, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSnapshot:
    """The state of a run at one time, for plots, tables and the store.

    The measured fields are computed from the steps.  While synchronous ranks train, a step counts
    only if every rank has reported it.
    """

    run_id: str
    name: str
    """The strategy, or the name of a hand-written loop."""
    comparison: str = ""
    """Name of the comparison.  The speed-up is relative to a run of the same comparison."""
    created: float = field(default_factory=time.time)
    """Seconds since 1970 (UTC)."""
    spec: RunSpec | None = None
    """The run's options; None for a hand-written loop logged with ``ddpnb.log``."""
    header: RunHeader | None = None
    status: Status = Status.RUNNING
    detail: str = ""
    """The reason why the run failed or stopped, in one clause."""
    num_bad: int = 0
    """Number of losses that are NaN or infinite."""
    staleness: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Numbers of updates with staleness 0, 1, 2 ..."""
    curve: Curve = field(default_factory=Curve)
    """The curve of the training loss."""
    ranks: tuple[RankTotals, ...] = ()
    events: Records = field(default_factory=lambda: stacked(()))
    """One row per step, read-only, in order of arrival.  After the run, each rank's last step ends
    at the time that the rank reported."""
    reports: tuple[RunReport, ...] = ()
    marks: tuple[Mark, ...] = ()
    """Events such as the death of a rank, in order of arrival."""
    evaluating: Evaluating | None = None
    """Progress of the models' evaluation; None if no evaluation has begun, or if unknown."""

    @property
    def num_events(self) -> int:
        """Number of steps of all workers."""
        return sum(rank.num_steps for rank in self.ranks)

    @property
    def num_samples(self) -> int:
        """Number of samples that all workers have trained on."""
        return sum(rank.num_samples for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Training seconds of the rank with the longest training time."""
        return max((rank.seconds for rank in self.ranks), default=0.0)

    @property
    def repeat(self) -> int:
        """The number of the repeat; 0 for the first run of this name in the comparison."""
        return 0 if self.spec is None else self.spec.repeat

    @property
    def is_running(self) -> bool:
        """True if more steps may arrive."""
        return self.status is Status.RUNNING

    @property
    def num_diverged(self) -> int:
        """Number of losses that are infinite or NaN; 0 if a hand-written loop logs no loss."""
        never_logged = self.spec is None and self.num_bad == self.num_events
        return 0 if never_logged else self.num_bad

    def reported(self, name: str) -> float:
        """Return the first value of the field ``name`` in the ranks' reports; NaN if missing."""
        values = [getattr(report, name) for report in self.reports]
        return next((value for value in values if not math.isnan(value)), math.nan)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes in the header and in the ranks' reports."""
        reported = (note for report in self.reports for note in report.notes)
        return (*(self.header.notes if self.header else ()), *self.warnings, *reported)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings in the ranks' reports, each once."""
        return tuple(dict.fromkeys(each for report in self.reports for each in report.warnings))

    @property
    def is_ceiling(self) -> bool:
        """True if all ranks stop after the same time instead of after the same step."""
        return self.spec is not None and self.spec.is_ceiling


@final
class Run:
    """Collects the steps of one run.  Snapshots are computed from these steps and never change.

    During training, a synchronous step counts only if every rank has reported the step.

    Args:
        known: the fields of ``RunSnapshot`` that are known before the first step.
    """

    def __init__(self, **known: Any) -> None:
        self._now = RunSnapshot(**known)
        self._rows: list[Records] = []
        self._num_rows = 0
        self._num_measured = 0
        self._is_settled = False
        """True if the run is over and its last snapshot has been computed."""
        self._lock = threading.Lock()  # one thread adds steps, other threads take snapshots

    @property
    def run_id(self) -> str:
        """The id of the run in batches and reports."""
        return self._now.run_id

    def add(self, batch: EventBatch) -> None:
        """Add a batch of events."""
        assert batch.run_id == self.run_id, (batch.run_id, self.run_id)
        with self._lock:
            self._rows.append(rows_of(batch))
            self._num_rows += batch.num_steps
            self._set(
                header=batch.header or self._now.header,
                marks=self._now.marks + batch.marks,
                evaluating=batch.evaluating or self._now.evaluating,
            )

    def add_report(self, report: RunReport) -> None:
        """Add a rank's report on the run."""
        assert report.run_id == self.run_id, (report.run_id, self.run_id)
        with self._lock:
            reports = [each for each in self._now.reports if each.rank != report.rank]
            self._set(reports=tuple(sorted([*reports, report], key=lambda each: each.rank)))

    def end(self, status: Status, detail: str = "") -> None:
        """Set the run's final status and the reason; may be called again."""
        with self._lock:
            self._set(status=Status(status), detail=detail)

    def snapshot(self) -> RunSnapshot:
        """Return a new snapshot, or the last snapshot if there are few new steps."""
        with self._lock:
            has_grown = self._num_rows * (1 - GROWTH) > self._num_measured
            if has_grown or not (self._now.is_running or self._is_settled):
                self._rows = [stacked(self._rows)]
                self._num_measured = self._num_rows
                self._is_settled = not self._now.is_running
                self._now = _measured(self._now, self._rows[0])
            return self._now

    def _set(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes)
        self._is_settled = False


def _measured(run: RunSnapshot, rows: Records) -> RunSnapshot:
    """Compute the run's curve and counts and the ranks' totals from the rows; return the run."""
    header = run.header
    if not run.is_running:
        rows = _with_ends(rows, run.reports)
    rows.flags.writeable = False
    run = replace(run, events=rows)
    if run.is_running and header is None and run.spec is not None:
        return run  # without a header, the kind of the steps is unknown
    is_synchronous = header is not None and header.synchronous
    if header is not None and is_synchronous and run.is_running:
        rows = complete_steps(rows, header.num_ranks or header.num_workers)
    drawn = complete_steps(rows, len(np.unique(rows["rank"]))) if run.is_ceiling else rows
    is_bad = ~np.isfinite(rows["loss"])
    if run.spec is not None:  # a worker without samples in a step has no loss
        is_bad &= rows["num_samples"] > 0
    timed = with_waiting(rows) if is_synchronous else rows
    return replace(
        run,
        num_bad=int(np.count_nonzero(is_bad)),
        staleness=np.bincount(rows["staleness"][rows["staleness"] != NO_STALENESS]),
        curve=curve_of(drawn, header),
        ranks=tuple(
            _totals(rank, timed[timed["rank"] == rank]) for rank in np.unique(rows["rank"]).tolist()
        ),
    )


def _with_ends(rows: Records, reports: tuple[RunReport, ...]) -> Records:
    """Return a copy in which each rank's last step ends at the time that the rank reported."""
    rows = rows.copy()
    for report in reports:
        own = np.flatnonzero(rows["rank"] == report.rank)
        if len(own) and report.seconds > rows["seconds"][own].max():  # False for a NaN report
            rows["seconds"][own[np.argmax(rows["seconds"][own])]] = report.seconds
    return rows


def _totals(rank: int, rows: Records) -> RankTotals:
    """Return the totals over all steps of a rank."""
    return RankTotals(
        rank=rank,
        num_steps=len(rows),
        num_samples=int(rows["num_samples"].sum()),
        seconds=float(rows["seconds"].max()),
        parts=Parts(*(float(rows[name].sum(dtype=np.float64)) for name in Parts._fields)),
        num_bytes_sent=int(rows["num_bytes_sent"].sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The mean step of one worker of a strategy, in seconds."""

    parts: Parts = field(default_factory=Parts)
    num_bytes_sent: float = math.nan
    """Bytes that one worker sent in one step."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step; hidden communication adds no time."""
        return sum(self.parts) - self.parts.hidden

    @property
    def is_known(self) -> bool:
        """True if the ranks reported the time of at least one part."""
        return self.seconds > 0

    @property
    def exposed_share(self) -> float:
        """Share of the step in which a worker exchanges tensors or waits for other ranks."""
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
    """Return each rank's ``own_seconds``, divided by the fastest rank's ``own_seconds``."""
    fastest = min((rank.own_seconds for rank in ranks), default=0.0)
    return {rank.rank: rank.own_seconds / fastest for rank in ranks} if fastest > 0 else {}
