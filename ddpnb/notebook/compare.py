"""How are strategies trained one after the other and compared?  (Notebook side.)"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpnb import catalogue
from ddpnb.catalogue import CELL_TASK, STRATEGIES
from ddpnb.errors import UserError
from ddpnb.notebook.cells import error_of, failures_of, tell_stale
from ddpnb.notebook.cluster.call import Events, Happening, Returned
from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.watch import Watch
from ddpnb.notebook.record.recorder import Recorder, new_id
from ddpnb.notebook.record.runs import Status
from ddpnb.notebook.record.store import Store
from ddpnb.notebook.show.failures import CellInterrupt, RankError
from ddpnb.notebook.show.live import Live, live
from ddpnb.notebook.show.result import ComparisonResult
from ddpnb.wire import OnRank, RunReport, RunSpec

BASELINE = "single"
FREE_CHECK_AFTER_SECONDS = 5.0
"""How long ranks may still check after one has refused; to free them costs the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """What is compared: strategies, and the training that is the same for all of them."""

    strategies: tuple[str, ...]
    task: str = CELL_TASK
    source: str = ""
    num_epochs: float = 2.0
    batch_size: int = 256
    learning_rate: float = 0.05
    seed: int = 0
    num_repeats: int = 1
    name: str = ""
    baseline: bool = True
    """Whether ``single`` is trained too, so that there is a speed-up to tell."""

    def __post_init__(self) -> None:
        if not self.strategies:
            names = ", ".join(STRATEGIES)
            raise UserError(f"Name the strategies to compare, one or more of: {names}.")
        for strategy in self.strategies:
            catalogue.strategy(strategy)
        catalogue.task(self.task)
        if self.task != CELL_TASK and self.source.strip():
            raise UserError(
                f"--task {self.task} and a cell that defines the task: leave one of them out."
            )
        if self.num_repeats < 1:
            raise UserError(f"--repeats must be at least 1, not {self.num_repeats}.")

    def run_specs(self) -> tuple[RunSpec, ...]:
        """Return every training: all strategies once, then all again, so that none is favoured."""
        strategies = dict.fromkeys(self.strategies)
        if self.baseline:
            strategies = dict.fromkeys([BASELINE, *strategies])
        return tuple(
            RunSpec(
                run_id=new_id(),
                strategy=strategy,
                task=self.task,
                source=self.source,
                num_epochs=self.num_epochs,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                seed=self.seed,
                repeat=repeat,
            )
            for repeat in range(self.num_repeats)
            for strategy in strategies
        )


@dataclass(kw_only=True, slots=True)
class Training:
    """A comparison that is being trained.

    Args:
        cluster: where.
        recorder: keeps the runs.
        specs: the trainings, in order.
        live: shows them.
    """

    cluster: Cluster
    recorder: Recorder
    specs: Sequence[RunSpec]
    live: Live = field(default_factory=live)
    _watch: Watch | None = None
    _is_stopped: bool = False

    def stop(self) -> None:
        """Have the run that trains end soon, and no other begin; from any thread."""
        self._is_stopped = True
        if self._watch is not None:
            self._watch.stop_requested = True

    def run(self) -> ComparisonResult:
        """Train everything; what was trained is shown and kept, however it ends.

        Raises:
            RankError: where a training failed.
            KeyboardInterrupt: where it was interrupted; the ranks have stopped.
        """
        try:
            for spec in self.specs:
                self._train(spec)
        finally:
            result = ComparisonResult(self.recorder.comparison)
            self.live.finish(result)
        return result

    def _train(self, spec: RunSpec) -> None:
        if self._is_stopped:
            raise CellInterrupt
        self.recorder.begin(spec.run_id, spec.strategy, spec)
        tell_stale(self.cluster.ensure_group())
        self._watch = watch = Watch(
            cluster=self.cluster,
            call=self.cluster.submit(OnRank("train"), spec, ranks=self.cluster.ranks),
            handle=self._handle,
            tick=lambda: self.live.update(self.recorder.comparison),
            stop_requested=self._is_stopped,  # meanwhile
        )
        try:
            watch.run()
            if watch.stop_requested:
                raise CellInterrupt
        except KeyboardInterrupt:
            self.recorder.end(spec.run_id, Status.STOPPED, "interrupted")
            raise CellInterrupt from None
        if (error := error_of(watch)) is not None:
            self.recorder.end(spec.run_id, Status.FAILED, watch.stuck or str(error))
            raise error
        self.recorder.end(spec.run_id, Status.FINISHED)

    def _handle(self, happening: Happening) -> None:
        if isinstance(happening, Events):
            self.recorder.add(happening.batch)
        elif isinstance(happening, Returned) and isinstance(happening.value, RunReport):
            self.recorder.add_report(happening.value)


def prepare(
    cluster: Cluster, store: Store, spec: ComparisonSpec, shown_by: Live | None = None
) -> Training:
    """Check that every strategy can be trained; return what trains them all.

    Args:
        cluster: where.
        store: keeps the runs.
        spec: what is compared.
        shown_by: shows it; by default a figure and a table under the current cell.

    Raises:
        UserError: where the task or a strategy cannot be trained, before anything is.
    """
    specs = spec.run_specs()
    tell_stale(cluster.ensure_group())
    for run_spec in {run_spec.strategy: run_spec for run_spec in specs}.values():
        check(cluster, run_spec)
    recorder = Recorder(
        store,
        name=spec.name,
        task=spec.task,
        source=spec.source,
        specs=specs,
        ranks=cluster.states,
    )
    return Training(cluster=cluster, recorder=recorder, specs=specs, live=shown_by or live())


def check(cluster: Cluster, spec: RunSpec) -> None:
    """Have every rank look for what would stop a training.

    Raises:
        UserError: where the user's own mistake would.
        RankError: where the cell itself fails.
        KeyboardInterrupt: where it was interrupted; the ranks have stopped.
    """
    watch = Watch(
        cluster=cluster,
        call=cluster.submit(OnRank("check"), spec, ranks=cluster.ranks),
        handle=lambda _: None,
        tick=lambda: None,
        free_after=FREE_CHECK_AFTER_SECONDS,
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        raise CellInterrupt from None
    failures = failures_of(watch)
    for failure in failures:
        if failure.name == UserError.__name__:
            raise UserError(failure.text)
    if failures:
        raise RankError(failures)
