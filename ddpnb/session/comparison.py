"""How are strategies trained one after the other and compared?  (Notebook side.)"""

import math
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields

from ddpnb.cluster.call import CallEvent, Events, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.recovery import RankRecovery
from ddpnb.cluster.supervision import Watch
from ddpnb.protocol.catalogue import BASELINE, CELL_TASK, STRATEGIES
from ddpnb.protocol.choices import check_transport, has_transport
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunReport, RunSpec
from ddpnb.protocol.processes import RankCommand
from ddpnb.protocol.rank_sets import format_ranks
from ddpnb.protocol.remote_call import OnRank
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.live import Live, live
from ddpnb.reports.plot_options import EVERYTHING, PlotOptions
from ddpnb.reports.result import ComparisonResult
from ddpnb.runs.model import Status
from ddpnb.runs.recorder import Recorder, new_id
from ddpnb.runs.store import Store
from ddpnb.session.cells import error_of, tell_stale
from ddpnb.session.errors import CellInterrupt, RankError, StuckError
from ddpnb.session.preflight import check, with_checkpoints

ORDER_SECONDS = 0.3
"""How often the ranks are told to stop, until they have."""
PATIENCE_SECONDS = 1.2
"""How long they may take to stop and to judge what was learnt, before they are interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """What is compared: strategies, and the training that is the same for all of them."""

    strategies: tuple[str, ...]
    """As they are written, e.g. ``"ddp"`` or ``"ddp:hook=fp16"``."""
    training: TrainingSpec
    num_repeats: int = 1
    name: str = ""
    baseline: bool = True
    """Whether ``single`` is trained too, so that there is a speed-up to tell."""
    options: PlotOptions = EVERYTHING

    def __post_init__(self) -> None:
        if not self.strategies:
            names = ", ".join(STRATEGIES)
            raise UserError(f"Name the strategies to compare, one or more of: {names}.")
        if wrong := dict.fromkeys(filter(None, map(self._wrong_with, self.strategies))):
            raise UserError(" ".join(wrong))
        transport = self.training.transport
        if transport != "auto" and not any(map(has_transport, self.strategies)):
            raise UserError(
                f"--transport {transport} is for asynchronous strategies, and there is none here: "
                "leave it out, or compare async too."
            )
        task = self.training.task
        if task != CELL_TASK and self.training.source.strip():
            raise UserError(
                f"--task {task} and a cell that defines the task: leave one of them out."
            )
        if self.num_repeats < 1:
            raise UserError(f"--repeats must be at least 1, not {self.num_repeats}.")

    def _wrong_with(self, strategy: str) -> str:
        """Say what is wrong with one of the strategies; nothing where it can be trained."""
        try:
            check_transport(strategy, self.training.transport)
        except UserError as error:
            return str(error)
        return ""

    def run_specs(self) -> tuple[RunSpec, ...]:
        """Return every training: all strategies once, then all again, so that none is favoured."""
        strategies = dict.fromkeys(self.strategies)
        if self.baseline:
            strategies = dict.fromkeys([BASELINE, *strategies])
        chosen = {entry.name: getattr(self.training, entry.name) for entry in fields(TrainingSpec)}
        return tuple(
            RunSpec(run_id=new_id(), strategy=strategy, repeat=repeat, **chosen)
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
        survivors: the strategies that train on where a rank other than 0 dies.
        live: shows them.
        view: what of them is shown.
    """

    cluster: Cluster
    recorder: Recorder
    specs: Sequence[RunSpec]
    survivors: Collection[str]
    live: Live = field(default_factory=live)
    options: PlotOptions = EVERYTHING
    _watch: Watch | None = None
    _is_stopped: bool = False
    _is_skipped: bool = False
    _next_order_seconds: float = 0.0
    _interrupt_seconds: float = math.inf

    def stop(self) -> None:
        """End the run in progress early, and begin no other; from any thread, also twice.

        All its ranks end it after the same step, and what it has learnt is judged; where that
        takes too long they are interrupted.
        """
        self._is_stopped = True

    def skip(self) -> None:
        """End the run in progress early, and go on with the next; from any thread, also twice.

        It ends as with ``stop``; where it is interrupted, the next trains in a new group.
        """
        self._is_skipped = True

    def run(self) -> ComparisonResult:
        """Train everything; what was trained is shown and kept, however it ends.

        A strategy that fails is left out from then on, and the others are trained; where the
        very first fails, so would they.

        Raises:
            RankError: where a training failed, in the end.
            KeyboardInterrupt: where it was interrupted; the ranks have stopped.
        """
        errors: dict[str, Exception] = {}
        try:
            for number, spec in enumerate(self.specs):
                if self._is_stopped or spec.strategy in errors:
                    continue
                try:
                    self._train(spec)
                except (UserError, RankError, StuckError) as error:
                    errors[spec.strategy] = error
                    left = [s.strategy for s in self.specs[number:] if s.strategy not in errors]
                    if not self._goes_on_without(spec.strategy, left, is_first=number == 0):
                        break
        finally:
            result = ComparisonResult(self.recorder.comparison, self.options)
            self.live.finish(result)
        if errors:
            raise next(iter(errors.values()))
        return result

    def _goes_on_without(self, failed: str, left: Sequence[str], *, is_first: bool) -> bool:
        """Say what becomes of the others where a strategy has failed."""
        if not left or self._is_stopped:
            return False
        names = ", ".join(dict.fromkeys(left))
        if is_first or self.cluster.lost is not None:
            print(f"Not trained: {names}.", file=sys.stderr)
            return False
        print(f"{failed} failed and is left out; still to be trained: {names}.", file=sys.stderr)
        self._bring_back("died, which ended the training")
        return True

    def _train(self, spec: RunSpec) -> None:
        tell_stale(self.cluster.ensure_group())
        self.recorder.begin(spec.run_id, spec.strategy, spec)
        recovery = RankRecovery(
            cluster=self.cluster,
            spec=spec,
            handle=self._handle,
            survives_deaths=spec.strategy in self.survivors,
        )
        self._watch = watch = Watch(
            cluster=self.cluster,
            call=self.cluster.submit(OnRank("train"), spec, ranks=self.cluster.ranks),
            handle=recovery.take,
            tick=lambda: self._tick(recovery),
            survives=recovery.survives,
        )
        self._is_skipped, self._interrupt_seconds = False, math.inf
        try:
            watch.run()
            if watch.stop_requested and self._is_stopped:
                raise CellInterrupt
        except KeyboardInterrupt:
            self.recorder.end(spec.run_id, Status.STOPPED, "interrupted")
            raise CellInterrupt from None
        finally:
            recovery.end()
        if watch.stop_requested:
            self.recorder.end(spec.run_id, Status.STOPPED, "interrupted")
            self.cluster.abort(self.cluster.living)  # what was begun in it may never end
            return
        watch.lost = {r: how for r, how in watch.lost.items() if not recovery.survives(r)}
        if (error := error_of(watch)) is not None:
            cause = error.cause if isinstance(error, RankError) else str(error)
            self.recorder.end(spec.run_id, Status.FAILED, watch.stuck or cause)
            if spec.kill and self._bring_back("was killed as wished, which ended the training"):
                return
            raise error
        reports = watch.returned.values()
        if any(isinstance(report, RunReport) and report.was_stopped for report in reports):
            self.recorder.end(spec.run_id, Status.STOPPED, "stopped by the user")
        else:
            self.recorder.end(spec.run_id, Status.FINISHED)
        self._tell_lost(recovery, watch.returned.get(0))
        self._bring_back("died while the others trained on")

    def _bring_back(self, how: str) -> bool:
        """Start ranks anew that have died, and say how; tell whether there were any."""
        dead = self.cluster.dead
        if not dead or self.cluster.lost is not None:
            return False
        tell_stale(self.cluster.bring_back(dead))
        print(
            f"Rank {format_ranks(dead)} {how}; it is a new process now, without the variables it "
            "had.",
            file=sys.stderr,
        )
        return True

    def _tick(self, recovery: RankRecovery) -> None:
        recovery.attend()
        if self.live.is_due():
            self.live.update(self.recorder.comparison)
        now = time.monotonic()
        if not (self._is_stopped or self._is_skipped):
            return
        self._interrupt_seconds = min(self._interrupt_seconds, now + PATIENCE_SECONDS)
        if self._watch is not None and now >= self._interrupt_seconds:
            self._watch.stop_requested = True
        if now >= self._next_order_seconds:
            self._next_order_seconds = now + ORDER_SECONDS  # one that came too early was lost
            for rank in self.cluster.living:
                self.cluster.processes.command(rank, RankCommand.STOP)

    def _tell_lost(self, recovery: RankRecovery, report: object) -> None:
        if recovery.came_back and isinstance(report, RunReport):
            print(
                f"{recovery.spec.strategy}: rank {format_ranks(sorted(recovery.came_back))} died, "
                f"which lost {report.num_lost_samples} samples, and is a new process now, without "
                "the variables it had.",
                file=sys.stderr,
            )

    def _handle(self, event: CallEvent) -> None:
        if isinstance(event, Events):
            self.recorder.add(event.batch)
        elif isinstance(event, Returned) and isinstance(event.value, RunReport):
            self.recorder.add_report(event.value)


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
    specs = with_checkpoints(spec.run_specs(), spec.strategies, store)
    tell_stale(cluster.ensure_group())
    each = {run_spec.strategy: run_spec for run_spec in specs}
    found = {name: check(cluster, run_spec) for name, run_spec in each.items()}
    recorder = Recorder(
        store,
        name=spec.name,
        task=spec.training.task,
        source=spec.training.source,
        specs=specs,
        ranks=cluster.states,
    )
    shown = shown_by or live(spec.options)
    shown.begin(recorder.comparison)
    return Training(
        cluster=cluster,
        recorder=recorder,
        specs=specs,
        survivors=frozenset(name for name, told in found.items() if told.survives_deaths),
        live=shown,
        options=spec.options,
    )
