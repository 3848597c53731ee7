"""What has arrived of one training so far?  (Notebook side.)"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

import numpy as np

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch, Mark, RunHeader, RunReport, RunSpec
from ddpnb.runs.aggregate import RunAggregate, RunAggregator
from ddpnb.runs.rows import EVENT, METRIC, Records, rows_of

MAX_KEPT_EVENTS = 20_000
"""Events of a run that stay in memory; those of a longer run lie in the store alone."""


class Status(StrEnum):
    """How far a run has come; compares equal to its own text, e.g. ``"failed"``."""

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
    """A run at one moment: what plots, tables and the store read."""

    run_id: str
    name: str
    """The strategy, or the name a hand-written loop was given."""
    comparison: str = ""
    """Name of the comparison that the run belongs to; speed-up is measured within it."""
    created: float = 0.0
    """Seconds since 1970 (UTC)."""
    spec: RunSpec | None = None
    """None for a hand-written loop logged with ``ddpnb.log``."""
    header: RunHeader | None = None
    status: Status = Status.RUNNING
    detail: str = ""
    """Why it failed or stopped, in one clause; ``ending`` puts it into words."""
    aggregate: RunAggregate = field(default_factory=RunAggregate)
    """What is drawn and counted; its size does not grow with the run."""
    kept: "Kept | None" = None
    """The events, where they are few enough to stay in memory."""
    history: "Callable[[], RunSnapshot] | None" = None
    """Reads this run with its events, where they do not."""
    reports: tuple[RunReport, ...] = ()
    marks: tuple[Mark, ...] = ()
    """What happened during the run, in order of arrival."""
    num_lost_batches: int = 0

    @property
    def repeat(self) -> int:
        """0 for the first training of this name in its comparison."""
        return 0 if self.spec is None else self.spec.repeat

    @property
    def num_samples_before(self) -> int:
        """Samples seen before it began, by the run that it resumes."""
        return self.header.num_samples_before if self.header else 0

    @property
    def is_running(self) -> bool:
        """Whether more events may come."""
        return self.status is Status.RUNNING

    @property
    def events(self) -> Records:
        """Rows of ``EVENT`` in order of arrival; of a long run, read anew at every access."""
        return self._whole().rows

    @property
    def metrics(self) -> Mapping[str, Records]:
        """Rows of ``METRIC`` for each of the user's own numbers; read anew likewise."""
        return self._whole().metrics

    def _whole(self) -> "Kept":
        if self.kept is None and self.history is not None:
            return self.history()._whole()
        return self.kept or Kept()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """Every event of a run."""

    row_parts: tuple[Records, ...] = ()
    metric_parts: Mapping[str, tuple[Records, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> Records:
        """All of them, in order of arrival, read-only."""
        rows = np.concatenate([np.empty(0, dtype=EVENT), *self.row_parts])
        rows.flags.writeable = False
        return rows

    @property
    def metrics(self) -> Mapping[str, Records]:
        """All of the user's own numbers."""
        return {name: np.concatenate(parts) for name, parts in self.metric_parts.items()}


@final
class Run:
    """Assembles the events of one training; ``snapshot`` is cheap and never changes.

    One thread may add while others take snapshots.

    Args:
        run_id: the id that its batches and reports carry.
        name: the strategy, or the name of a hand-written loop.
        comparison: name of the comparison that it belongs to.
        spec: what is trained; None for a hand-written loop.
        created: seconds since 1970; now if not given.
        num_ranks: how many ranks may tell of a hand-written loop.
        history: reads the run with all its events, once they no longer stay in memory;
            without it, they stay.
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
        history: Callable[[], RunSnapshot] | None = None,
    ) -> None:
        self._history = history
        self._start = RunSnapshot(
            run_id=run_id,
            name=name,
            comparison=comparison,
            spec=spec,
            created=time.time() if created is None else created,
        )
        self._header: RunHeader | None = None
        self._ending = (Status.RUNNING, "")
        self._aggregate = RunAggregator(spec, num_ranks)
        self._events: list[Records] | None = []
        self._num_kept = 0
        self._metrics: dict[str, list[Records]] = {}
        self._marks: list[Mark] = []
        self._reports: dict[int, RunReport] = {}
        self._num_sequences: dict[int, int] = {}
        self._missing: set[tuple[int, int]] = set()

    @classmethod
    def of_spec(cls, spec: RunSpec, *, comparison: str = "", created: float | None = None) -> "Run":
        """Return an empty run for ``spec``, named after its strategy."""
        return cls(
            run_id=spec.run_id,
            name=spec.strategy,
            comparison=comparison,
            spec=spec,
            created=created,
        )

    @property
    def run_id(self) -> str:
        """The id that this run's batches and reports carry."""
        return self._start.run_id

    def add(self, batch: EventBatch) -> bool:
        """Take in what a rank flushed; return False if that batch was already here."""
        assert batch.run_id == self.run_id, (batch.run_id, self.run_id)
        if not self._is_new(batch.rank, batch.sequence):
            return False
        if batch.header is not None:
            self._header = batch.header
        rows = rows_of(batch)
        self._aggregate.add(rows, batch.header)
        self._keep(rows, batch.metrics)
        self._marks.extend(batch.marks)
        return True

    def add_report(self, report: RunReport) -> None:
        """Take in what a rank returned; batches it sent that never came count as lost."""
        assert report.run_id == self.run_id, (report.run_id, self.run_id)
        self._reports[report.rank] = report
        self._expect(report.rank, report.num_batches_sent)

    def end(self, status: Status, detail: str = "") -> None:
        """Say how the run ended; the last word counts.

        From now on it amounts to the same whenever its events came, live or from the store.
        """
        self._aggregate.end()
        self._ending = (Status(status), detail)
        if not self._aggregate.is_in_order:
            self._put_in_order()

    def snapshot(self) -> RunSnapshot:
        """Return the run as it is now; costs the same however long it is."""
        status, detail = self._ending
        return RunSnapshot(
            run_id=self._start.run_id,
            name=self._start.name,
            comparison=self._start.comparison,
            created=self._start.created,
            spec=self._start.spec,
            header=self._header,
            status=status,
            detail=detail,
            aggregate=self._aggregate.snapshot(),
            kept=self._kept(),
            history=self._history,
            reports=tuple(report for _, report in sorted(self._reports.items())),
            marks=tuple(self._marks),
            num_lost_batches=len(self._missing),
        )

    def _put_in_order(self) -> None:
        """Join all events once more, now that they are known; if they cannot be read, do not."""
        now = self.snapshot()
        with contextlib.suppress(UserError):
            rows = now.events
            if len(rows) == now.aggregate.num_events:
                self._aggregate = RunAggregator.from_all(rows, now.spec, now.header)

    def _keep(self, rows: Records, metrics: tuple[tuple[int, str, float], ...]) -> None:
        """Keep the events, until there are too many for memory."""
        if self._events is None:
            return
        offset = self._num_kept
        if self._history is not None and offset + len(rows) > MAX_KEPT_EVENTS:
            self._events = None
            self._metrics.clear()
            return
        for name in dict.fromkeys(name for _, name, _ in metrics):
            numbers = [(offset + index, value) for index, own, value in metrics if own == name]
            self._metrics.setdefault(name, []).append(np.array(numbers, dtype=METRIC))
        self._events.append(rows)
        self._num_kept += len(rows)

    def _kept(self) -> Kept | None:
        if self._events is None:
            return None
        metrics = {name: tuple(parts) for name, parts in list(self._metrics.items())}
        return Kept(row_parts=tuple(self._events), metric_parts=metrics)

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
