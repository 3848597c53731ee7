"""Who keeps a comparison while it trains, in memory and on disk?  (Notebook side.)"""

import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import final

from ddpnb.protocol.messages import EventBatch, RankState, RunReport, RunSpec
from ddpnb.runs.comparison import Comparison, circumstances, environment
from ddpnb.runs.database import StoreError
from ddpnb.runs.model import Run, Status
from ddpnb.runs.store import Store


@final
class Recorder:
    """Records one comparison's runs as they are trained.

    A disk that refuses does not stop a training: that is said once, and the runs
    stay in memory.

    Args:
        store: where runs are kept.
        name: the name asked for; empty: one is made from ``task``.
        task: what is trained, in a word.
        source: the cell that defines it.
        specs: every training that will come, in order.
        ranks: where they train.
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
        self._runs: list[Run] = []
        self._warned = False
        self._comparison = Comparison(
            comparison_id=new_id(),
            name=name or task,
            created=time.time(),
            task=task,
            source=source,
            specs=tuple(specs),
            environment=environment() | (circumstances(ranks) if ranks else {}),
        )
        self._keep(self._begin, name)

    @property
    def comparison(self) -> Comparison:
        """The comparison as it is now."""
        return self._comparison.with_runs([run.snapshot() for run in self._runs])

    def begin(
        self, run_id: str, name: str, spec: RunSpec | None = None, *, num_ranks: int = 1
    ) -> None:
        """Note that a run is about to train; a hand-written loop, on so many ranks."""
        run = Run(
            run_id=run_id,
            name=name,
            comparison=self._comparison.name,
            spec=spec,
            num_ranks=num_ranks,
            history=lambda: self._store.load(run_id).runs[0],
        )
        self._runs.append(run)
        self._keep(self._store.begin_run, self._comparison.comparison_id, run.snapshot())

    def add(self, batch: EventBatch) -> None:
        """Take in what a rank flushed."""
        self._run(batch.run_id).add(batch)
        self._keep(self._store.append, batch)

    def add_report(self, report: RunReport) -> None:
        """Take in what a rank returned."""
        if report.took_part:
            self._run(report.run_id).add_report(report)
            self._keep(self._store.add_report, report)

    def end(self, run_id: str, status: Status, detail: str = "") -> None:
        """Note how a run ended."""
        self._run(run_id).end(status, detail)
        self._keep(self._store.finish, run_id, status, detail)

    def _run(self, run_id: str) -> Run:
        return next(run for run in self._runs if run.run_id == run_id)

    def _begin(self, wanted_name: str) -> None:
        self._comparison = self._store.begin_comparison(self._comparison, wanted_name=wanted_name)

    def _keep(self, write: Callable[..., None], *arguments: object) -> None:
        try:
            write(*arguments)
        except StoreError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"The runs are not being saved: {error}", stacklevel=2)


def new_id() -> str:
    """Return an id that no other run or comparison has."""
    return uuid.uuid4().hex[:12]
