"""Records a comparison during training, in memory and in the store.  Runs in the kernel."""

import sqlite3
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import final

from ddpnb.history.comparison import Comparison, describe_ranks, environment
from ddpnb.history.model import Run, Status
from ddpnb.history.store import ELSEWHERE, Store, StoreError, temporary_folder
from ddpnb.protocol.messages import EventBatch, RankState, RunReport, RunSpec


@final
class Recorder:
    """Records the runs of one comparison during training.

    If the disk fails, the training continues.  ddpnb warns once and keeps the runs in a temporary
    folder.  While another notebook locks the store, ddpnb keeps the runs only in memory.

    Args:
        store: the store that keeps the runs.
        name: the user's name for the comparison.  If empty, the task's name with a number is used.
        task: the task that the runs train.
        source: the cell that defines the task.
        specs: all planned runs, in order.
        ranks: the ranks that train.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        task: str,
        source: str,
        specs: Sequence[RunSpec],
        ranks: Sequence[RankState] = (),
    ) -> None:
        self._store = store
        self._runs: dict[str, Run] = {}
        self._warned = False
        self._comparison = Comparison(
            comparison_id=new_id(),
            name=name or task,
            created=time.time(),
            task=task,
            source=source,
            specs=tuple(specs),
            environment=environment() | (describe_ranks(ranks) if ranks else {}),
        )
        self._write(self._begin, name)

    @property
    def comparison(self) -> Comparison:
        """The comparison with the latest snapshot of each run."""
        return self._comparison.with_runs([run.snapshot() for run in self._runs.values()])

    def begin(self, run_id: str, name: str, spec: RunSpec | None = None) -> None:
        """Begin a run."""
        run = self._runs[run_id] = Run(
            run_id=run_id,
            name=name,
            comparison=self._comparison.name,
            spec=spec,
        )
        self._write(self._store.begin_run, self._comparison.comparison_id, run.snapshot())

    def add(self, batch: EventBatch) -> None:
        """Add a batch of events."""
        self._runs[batch.run_id].add(batch)
        self._write(self._store.append, batch)

    def add_report(self, report: RunReport) -> None:
        """Add the report of a rank."""
        self._runs[report.run_id].add_report(report)
        self._write(self._store.add_report, report)

    def end(self, run_id: str, status: Status, detail: str = "") -> None:
        """Record how a run ended."""
        self._runs[run_id].end(status, detail)
        self._write(self._store.finish, run_id, status, detail)

    def _begin(self, wanted_name: str) -> None:
        self._comparison = self._store.begin_comparison(self._comparison, wanted_name=wanted_name)

    def _write(self, write: Callable[..., None], *arguments: object) -> None:
        try:
            write(*arguments)
        except StoreError as error:
            if self._warned:
                return
            self._warned, why, where = True, error.__cause__, "only in memory"
            if getattr(why, "sqlite_errorcode", 0) != sqlite3.SQLITE_BUSY:
                self._store.move(temporary_folder())
                where = f"in {self._store.folder} until the kernel ends {ELSEWHERE}"
            text = f"The runs cannot be written: {why}. ddpnb keeps them {where}."
            warnings.warn(text, stacklevel=2)
            self._write(write, *arguments)


def new_id() -> str:
    """Return an id that no other run or comparison has."""
    return uuid.uuid4().hex[:12]
