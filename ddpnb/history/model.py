"""One run: the events that have arrived, and a snapshot to draw.  (Kernel.)"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from ddpnb.history.aggregate import Curve, RunAggregate, RunAggregator
from ddpnb.history.database import EVENT, METRIC, Records, rows_of
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Evaluating, EventBatch, Mark, RunHeader, RunReport, RunSpec

MAX_EVENTS_IN_MEMORY = 20_000
"""The events of a longer run are in the store alone."""


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
class RunSnapshot:
    """A run at one moment: plots, tables and the store read it."""

    run_id: str
    name: str
    """The strategy, or the name of a hand-written loop."""
    comparison: str = ""
    """Name of its comparison; speed-up is measured within one."""
    created: float = 0.0
    """Seconds since 1970 (UTC)."""
    spec: RunSpec | None = None
    """None for a hand-written loop logged with ``ddpnb.log``."""
    header: RunHeader | None = None
    status: Status = Status.RUNNING
    detail: str = ""
    """Why it failed or stopped, in one clause."""
    aggregate: RunAggregate = field(default_factory=RunAggregate)
    """Its curve, tracks and totals; the size does not grow with the run."""
    row_parts: tuple[Records, ...] | None = ()
    """Its events as they arrived; None where there are too many for memory."""
    metric_parts: Mapping[str, tuple[Records, ...]] = field(default_factory=dict)
    """The numbers that the user logged, likewise."""
    metric_curves: Mapping[str, Curve] = field(default_factory=dict)
    """The curve of each of them, made as that of the loss."""
    load: "Callable[[], RunSnapshot] | None" = None
    """Reads this run with its events from the store."""
    reports: tuple[RunReport, ...] = ()
    marks: tuple[Mark, ...] = ()
    """In order of arrival."""
    evaluating: Evaluating | None = None
    """How far its models have been judged; None: not begun, or not known."""
    num_lost_batches: int = 0

    @property
    def repeat(self) -> int:
        """0 for the first run of this name in its comparison."""
        return 0 if self.spec is None else self.spec.repeat

    @property
    def is_running(self) -> bool:
        """Whether more events may come."""
        return self.status is Status.RUNNING

    @property
    def events(self) -> Records:
        """Rows of ``EVENT``, read-only, in order of arrival; a long run is read again each time."""
        rows = np.concatenate([np.empty(0, dtype=EVENT), *(self._whole().row_parts or ())])
        rows.flags.writeable = False
        return rows

    @property
    def metrics(self) -> Mapping[str, Records]:
        """Rows of ``METRIC`` by the user's name for them; read again likewise."""
        return {name: np.concatenate(parts) for name, parts in self._whole().metric_parts.items()}

    def _whole(self) -> "RunSnapshot":
        return self if self.row_parts is not None or self.load is None else self.load()._whole()


def _with_metric(rows: Records, indices: ArrayLike, values: ArrayLike) -> Records:
    """Return rows with the values of a metric, at these indices, in place of the loss."""
    shown = rows.copy()
    shown["loss"] = np.nan
    shown["loss"][np.asarray(indices, dtype=np.intp)] = values
    return shown


@final
class Run:
    """Assembles the events of one run; a snapshot is cheap and never changes.

    One thread may add while others take snapshots.

    Args:
        run_id: the id in its batches and reports.
        name: the strategy, or the name of a hand-written loop.
        comparison: name of its comparison.
        spec: what is trained; None for a hand-written loop.
        created: seconds since 1970; now if not given.
        num_ranks: how many ranks may log from a hand-written loop.
        load: reads the run with its events from the store; without it, all stay in memory.
    """

    def __init__(
        self,
        *,
        run_id: str,
        name: str,
        comparison: str = "",
        spec: RunSpec | None = None,
        created: float | None = None,
        num_ranks: int = 1,
        load: Callable[[], RunSnapshot] | None = None,
    ) -> None:
        self._start = RunSnapshot(
            run_id=run_id,
            name=name,
            comparison=comparison,
            spec=spec,
            created=time.time() if created is None else created,
            load=load,
        )
        self._header: RunHeader | None = None
        self._ending = (Status.RUNNING, "")
        self._num_ranks = num_ranks
        self._aggregate = RunAggregator(spec, num_ranks)
        self._metric_aggregates: dict[str, RunAggregator] = {}
        self._events: list[Records] | None = []
        self._num_events = 0
        self._metrics: dict[str, list[Records]] = {}
        self._marks: list[Mark] = []
        self._evaluating: Evaluating | None = None
        self._reports: dict[int, RunReport] = {}
        self._num_sequences: dict[int, int] = {}
        self._missing: set[tuple[int, int]] = set()

    @property
    def run_id(self) -> str:
        """The id in its batches and reports."""
        return self._start.run_id

    def add(self, batch: EventBatch) -> bool:
        """Add a batch; return False if it was here already."""
        assert batch.run_id == self.run_id, (batch.run_id, self.run_id)
        if not self._is_new(batch.rank, batch.sequence):
            return False
        if batch.header is not None:
            self._header = batch.header
        rows = rows_of(batch)
        self._aggregate.add(rows, batch.header)
        self._aggregate_metrics(rows, batch)
        self._store_in_memory(rows, batch.metrics)
        self._marks.extend(batch.marks)
        self._evaluating = batch.evaluating or self._evaluating
        return True

    def add_report(self, report: RunReport) -> None:
        """Add the report of a rank; batches that it sent and that have not come count as lost."""
        assert report.run_id == self.run_id, (report.run_id, self.run_id)
        self._reports[report.rank] = report
        self._expect(report.rank, report.num_batches_sent)

    def end(self, status: Status, detail: str = "") -> None:
        """Set how the run ended; may be called again.

        Events that came too late for their place are put in order now, so that the live run and
        the stored one have the same aggregate.
        """
        self._aggregate.end()
        for aggregator in list(self._metric_aggregates.values()):
            aggregator.end()
        self._ending = (Status(status), detail)
        if not self._aggregate.is_in_order:
            self._aggregate_again()

    def snapshot(self) -> RunSnapshot:
        """Return the run as it is now; costs the same however long it is."""
        status, detail = self._ending
        events = self._events
        return replace(
            self._start,
            header=self._header,
            status=status,
            detail=detail,
            aggregate=self._aggregate.snapshot(),
            row_parts=None if events is None else tuple(events),
            metric_parts={name: tuple(parts) for name, parts in list(self._metrics.items())},
            metric_curves={
                name: aggregator.snapshot().curve
                for name, aggregator in list(self._metric_aggregates.items())
            },
            reports=tuple(report for _, report in sorted(self._reports.items())),
            marks=tuple(self._marks),
            evaluating=self._evaluating,
            num_lost_batches=len(self._missing),
        )

    def _aggregate_again(self) -> None:
        """Aggregate all events in their order, if the store can be read."""
        now = self.snapshot()
        with contextlib.suppress(UserError):
            rows = now.events
            if len(rows) == now.aggregate.num_events:
                self._aggregate = RunAggregator.from_all(rows, now.spec, now.header)
                for name, found in now.metrics.items():
                    values = _with_metric(rows, found["event"], found["value"])
                    again = RunAggregator.from_all(values, now.spec, now.header)
                    self._metric_aggregates[name] = again

    def _aggregate_metrics(self, rows: Records, batch: EventBatch) -> None:
        """Add the metrics of some rows to their curves, each in the place of the loss."""
        if not batch.metrics and not self._metric_aggregates:
            return
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in self._metric_aggregates}
        for index, name, value in batch.metrics:
            found.setdefault(name, []).append((index, value))
        for name, values in found.items():
            if name not in self._metric_aggregates:
                made = RunAggregator(self._start.spec, self._num_ranks)
                early = _with_metric(np.concatenate([rows[:0], *(self._events or ())]), [], [])
                made.add(early, self._header)  # the samples before its first value
                self._metric_aggregates[name] = made
            indices, numbers = zip(*values, strict=True) if values else ((), ())
            shown = _with_metric(rows, list(indices), list(numbers))
            self._metric_aggregates[name].add(shown, batch.header)

    def _store_in_memory(self, rows: Records, metrics: tuple[tuple[int, str, float], ...]) -> None:
        """Keep the events until there are too many for memory."""
        if self._events is None:
            return
        offset = self._num_events
        if self._start.load is not None and offset + len(rows) > MAX_EVENTS_IN_MEMORY:
            self._events = None
            self._metrics.clear()
            return
        for name in dict.fromkeys(name for _, name, _ in metrics):
            numbers = [(offset + index, value) for index, own, value in metrics if own == name]
            self._metrics.setdefault(name, []).append(np.array(numbers, dtype=METRIC))
        self._events.append(rows)
        self._num_events += len(rows)

    def _is_new(self, rank: int, sequence: int) -> bool:
        if (rank, sequence) in self._missing:
            self._missing.remove((rank, sequence))
            return True
        if sequence < self._num_sequences.get(rank, 0):
            return False
        self._expect(rank, sequence)
        self._num_sequences[rank] = sequence + 1
        return True

    def _expect(self, rank: int, num_sequences: int) -> None:
        """Count as missing every batch below ``num_sequences`` that has not come."""
        first = self._num_sequences.get(rank, 0)
        self._missing.update((rank, sequence) for sequence in range(first, num_sequences))
        self._num_sequences[rank] = max(first, num_sequences)
