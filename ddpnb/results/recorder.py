"""Records a comparison during training, in memory and in the store.  Runs in the kernel."""

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from ddpnb.protocol.messages import EventBatch, RankState, RunReport, RunSpec
from ddpnb.results.comparison import Comparison, describe_ranks, environment
from ddpnb.results.run import Run, Status
from ddpnb.results.store import Store


@final
class Recorder:
    """Records the runs of one comparison during training.

    The store writes in a thread, so that no method waits long for the disk.  If the disk fails, the
    training continues, and ddpnb warns once.

    Args:
        store: the store that keeps the runs.
        name: the user's name for the comparison.  If empty, the task's name with a number is used.
        task: the task that the runs train.
        source: the cell that defines the task.
        specs: all planned runs, in order.
        ranks: the ranks that train.
        notify: function that shows a sentence to the user.
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
        notify: Callable[[str], None] = print,
    ) -> None:
        self._store = store
        self._runs: dict[str, Run] = {}
        self._warned = False
        self._notify = notify
        comparison = Comparison(
            comparison_id=new_id(),
            name=name or task,
            created=time.time(),
            task=task,
            source=source,
            specs=tuple(specs),
            environment=environment() | (describe_ranks(ranks) if ranks else {}),
        )
        self._comparison = store.begin_comparison(comparison, wanted_name=name)
        self._warn()

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
            read_steps=partial(self._store.steps, run_id),
        )
        self._store.begin_run(self._comparison.comparison_id, run.snapshot())

    def add(self, batch: EventBatch) -> None:
        """Add a batch of events."""
        self._runs[batch.run_id].add(batch)
        self._store.append(batch)
        self._warn()

    def add_report(self, report: RunReport) -> None:
        """Add the report of a rank."""
        self._runs[report.run_id].add_report(report)
        self._store.add_report(report)

    def end(self, run_id: str, status: Status, detail: str = "") -> None:
        """Record how a run ended."""
        self._runs[run_id].end(status, detail)
        self._store.finish(run_id, status, detail)
        self._warn()

    def _warn(self) -> None:
        if not self._warned and (trouble := self._store.trouble):
            self._warned = True
            self._notify(trouble)


def new_id() -> str:
    """Return an id that no other run or comparison has."""
    return uuid.uuid4().hex[:12]
