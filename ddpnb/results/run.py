"""Collects a run's steps as they arrive, and returns snapshots.  Runs in the kernel."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.messages import (
    NO_STALENESS,
    Evaluating,
    Evaluation,
    EventBatch,
    Mark,
    Parts,
    RunHeader,
    RunReport,
    RunSpec,
)
from ddpnb.results.curve import Curve, complete_steps, curve_of, end_of, waiting_seconds
from ddpnb.results.rows import Records, metrics_of, rows_of, stacked, with_ends

GROWTH = 1 / 200
"""During training, a snapshot is computed again as soon as this share of the steps is new."""

KEPT = np.dtype(
    [
        *(("seconds", "<f8"), ("loss", "<f8"), ("num_samples", "<i8"), ("step", "<i4")),
        *(("rank", "<i4"), ("communication", "<f4")),
    ]
)
"""The fields of each step that stay in memory."""

SUMMED = (*Parts._fields, "num_bytes_sent")
WAITING_INDEX = SUMMED.index("waiting")

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

    The measured fields are computed from the steps.  The steps themselves stay in the store.
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
    last: Mapping[str, float] = field(default_factory=dict)
    """The end of the curve of each logged number, by name, once the run is over."""
    read_steps: Callable[[], Records] = lambda: stacked(())
    """A function that reads the run's steps from the store."""
    reports: tuple[RunReport, ...] = ()
    marks: tuple[Mark, ...] = ()
    """Events such as the death of a rank, in order of arrival."""
    evaluating: Evaluating | None = None
    """Progress of the models' evaluation; None if no evaluation has begun, or if unknown."""

    @property
    def events(self) -> Records:
        """One row per step, read from the store, in order of arrival.

        After the run, each rank's last step ends at the time that the rank reported.
        """
        rows = self.read_steps()
        return rows if self.is_running else with_ends(rows, self.reports)

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
    def samples_per_second(self) -> float:
        """The number of samples, divided by the slowest worker's seconds; NaN if unknown.

        For a ceiling, all workers train for the same time.  Each worker counts as fast as the
        slowest.  During training, only the steps in the curve count.
        """
        if self.is_running:
            done = [(each[-1]) for each in (self.curve.samples, self.curve.seconds) if len(each)]
            samples, seconds = done or (0.0, 0.0)
        elif self.is_ceiling and (workers := [each for each in self.ranks if each.seconds]):
            return len(workers) * min(each.num_samples / each.seconds for each in workers)
        else:
            samples, seconds = self.num_samples, self.seconds
        return float(samples / seconds) if seconds > 0 and samples else math.nan

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
    def metrics(self) -> Mapping[str, float]:
        """The held-out values of the cell's ``metric`` function, by name."""
        return {k: value for each in self.reports for k, value in each.held_out_metrics.items()}

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The held-out evaluations, if any.  The last evaluation is of the trained model."""
        found = next((report.evaluations for report in self.reports if report.evaluations), ())
        if not found or self.status is not Status.FINISHED:
            return found
        before = tuple(each for each in found if each.num_samples < self.num_samples)
        return before + self.trained_model

    @property
    def trained_model(self) -> tuple[Evaluation, ...]:
        """The evaluation of the trained model; empty if the model was not evaluated."""
        last = Evaluation(
            num_samples=self.num_samples,
            seconds=self.seconds,
            loss=self.reported("held_out_loss"),
            accuracy=self.reported("held_out_accuracy"),
        )
        is_judged = any(report.num_held_out for report in self.reports)
        return (last,) if is_judged or not math.isnan(last.loss) else ()

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

    A run keeps 36 bytes of each step for the curve, 8 bytes of each logged number, and each rank's
    sums of all other fields.
    During training, a synchronous step counts in the curve only if every rank has reported it.

    Args:
        known: the fields of ``RunSnapshot`` that are known before the first step.
    """

    def __init__(self, **known: Any) -> None:
        self._now = RunSnapshot(**known)
        self._kept = bytearray()
        self._metrics: dict[str, bytearray] = {}
        """The values of each logged number in the first rows, by name; NaN if a row has none."""
        self._sums: dict[int, Records] = {}
        """Each rank's sums of ``parts`` and bytes."""
        self._staleness = np.zeros(0, dtype=np.int64)
        self._num_rows = self._num_measured = 0
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
        rows = rows_of(batch)  # raises an error if a logged number belongs to no row
        with self._lock:
            for name, field_name in metrics_of(rows).items():
                values = self._metrics.setdefault(name, bytearray())
                values += np.full(self._num_rows - len(values) // 8, np.nan).tobytes()
                values += rows[field_name].tobytes()
            self._kept += rows[list(KEPT.names or ())].astype(KEPT).tobytes()
            self._num_rows += len(rows)
            sums = [rows[name].sum(dtype=np.float64) for name in SUMMED]
            self._sums[batch.rank] = self._sums.get(batch.rank, 0.0) + np.array(sums)
            stale = np.bincount(rows["staleness"][rows["staleness"] != NO_STALENESS])
            counts = np.zeros(max(len(stale), len(self._staleness)), dtype=np.int64)
            for each in (stale, self._staleness):
                counts[: len(each)] += each
            self._staleness = counts
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
                self._num_measured = self._num_rows
                self._is_settled = not self._now.is_running
                self._now = self._measured()
            return self._now

    def _set(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes)
        self._is_settled = False

    def _measured(self) -> RunSnapshot:
        """Compute the run's curve and counts and the ranks' totals from the kept rows."""
        run, header = self._now, self._now.header
        if run.is_running and header is None and run.spec is not None:
            return run  # without a header, the kind of the steps is unknown
        every = np.frombuffer(self._kept, dtype=KEPT)
        if not run.is_running:
            every = with_ends(every, run.reports)
        rows, is_synchronous = every, header is not None and header.synchronous
        if header is not None and is_synchronous and run.is_running:
            rows = complete_steps(every, header.num_ranks or header.num_workers)
        drawn = complete_steps(rows, len(np.unique(rows["rank"]))) if run.is_ceiling else rows
        is_bad = ~np.isfinite(rows["loss"])
        if run.spec is not None:  # a worker without samples in a step has no loss
            is_bad &= rows["num_samples"] > 0
        last = {}
        for name, known in self._metrics.items() if not run.is_running else ():
            values = np.full(len(every), np.nan)
            values[: len(known) // 8] = np.frombuffer(known)
            last[name] = end_of(curve_of(every, header, values))
        return replace(
            run,
            num_bad=int(np.count_nonzero(is_bad)),
            staleness=self._staleness,
            curve=curve_of(drawn, header),
            last=last,
            ranks=self._totals(every, rows if is_synchronous else every[:0]),
        )

    def _totals(self, every: Records, together: Records) -> tuple[RankTotals, ...]:
        """Return the totals of each rank.

        Args:
            every: the kept rows of all steps.
            together: the rows of the synchronous steps that every rank has reported.
        """
        if any(each[WAITING_INDEX] for each in self._sums.values()):
            together = together[:0]  # the strategy itself has measured the waiting
        waited = waiting_seconds(together)
        made = []
        for rank, sums in sorted(self._sums.items()):
            is_own = every["rank"] == rank
            if not is_own.any():
                continue
            *parts, num_bytes = sums.tolist()
            waiting = float(waited[together["rank"] == rank].sum())
            whole = Parts(*parts)
            totals = RankTotals(
                rank=rank,
                num_steps=int(np.count_nonzero(is_own)),
                num_samples=int(every["num_samples"][is_own].sum()),
                seconds=float(every["seconds"][is_own].max()),
                parts=whole._replace(
                    communication=whole.communication - waiting, waiting=whole.waiting + waiting
                ),
                num_bytes_sent=int(num_bytes),
            )
            made.append(totals)
        return tuple(made)


def slowness(ranks: Sequence[RankTotals]) -> dict[int, float]:
    """Return each rank's ``own_seconds``, divided by the fastest rank's ``own_seconds``."""
    fastest = min((rank.own_seconds for rank in ranks), default=0.0)
    return {rank.rank: rank.own_seconds / fastest for rank in ranks} if fastest > 0 else {}
