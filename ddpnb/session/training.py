"""Trains the runs of a comparison, one after the other.  Runs in the kernel."""

import contextlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from ddpnb.cluster.call import CallEvent, Output, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back, ensure_group
from ddpnb.cluster.supervision import Watch
from ddpnb.cluster.wording import them
from ddpnb.output.cell_output import PrintedLines
from ddpnb.protocol.calls import calls
from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.protocol.messages import Checked, EventBatch, RunReport, RunSpec
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.processes import RankCommand
from ddpnb.reports.live import Live
from ddpnb.reports.notebook import warn
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.recorder import Recorder
from ddpnb.results.run import Status
from ddpnb.session.background import Background
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.errors import CellInterrupt, HangError, RankError, error_of, kept, warn_stale
from ddpnb.session.machine import OtherPrograms, disturbance
from ddpnb.session.recovery import RankRecovery
from ddpnb.session.variables import pull

STOP_INTERVAL_SECONDS = 0.3
"""Time between two stop requests.  The kernel repeats the request until the ranks have stopped."""
CLEAN_UP_SECONDS = 2.0
"""Maximum time for the ranks to delete a comparison's data."""
FAILURE_SECONDS = 1.2
"""Maximum time for ranks to stop and evaluate the model before the kernel interrupts the ranks."""


@final
@dataclass(kw_only=True, eq=False, repr=False)
class RunningComparison(Background):
    """A comparison in progress, which trains its runs one after the other."""

    cluster: Cluster
    recorder: Recorder
    specs: Sequence[RunSpec]
    checked: Mapping[str, Checked]
    """The result of the check of each strategy."""
    live: Live
    printed: PrintedLines
    asked: ComparisonSpec
    _result: ComparisonResult | None = None
    """The result, once all runs have ended."""
    _next_stop_at: float = 0.0
    _interrupt_at: float = math.inf

    def __post_init__(self) -> None:
        super().__init__("comparison")

    def run(self) -> ComparisonResult:
        """Train all strategies, then show and store the results, even after an error.

        If a strategy fails, its remaining runs are skipped, and the other strategies are trained.

        Raises:
            RankError: a strategy failed.  The first failed strategy's error is raised at the end.
            KeyboardInterrupt: the comparison was interrupted, and the ranks have stopped.
        """
        errors: dict[str, Exception] = {}
        load = OtherPrograms()
        try:
            for number, spec in enumerate(self.specs):
                if self.stop_requested or spec.strategy in errors:
                    continue
                try:
                    self._train(self._at_best_rate(spec))
                except (UserError, RankError, HangError) as error:
                    errors[spec.strategy] = error
                    rest = [s.strategy for s in self.specs[number:] if s.strategy not in errors]
                    if not self._continue_without(spec.strategy, rest):
                        break
        finally:
            clean_up(self.cluster)
            self._result = result = self.result
            is_on_cores = all(state.device == "cpu" for state in self.cluster.states)
            is_measured = not any(spec.is_emulated for spec in self.specs)
            if is_on_cores and is_measured and self.cluster.is_local:
                result.remark = disturbance(load.share(), len(self.cluster.ranks))
            self.live.finish(result)
            self.printed.show()
        if errors:
            (_, first), *others = errors.items()
            for name, other in others:
                warn(f"{name} also failed: {_cause_of(other)}")
            raise first
        return result

    @property
    def result(self) -> ComparisonResult:
        """The result of all runs so far."""
        if self._result is not None:
            return self._result
        return ComparisonResult(self.recorder.comparison, self.asked.options, self._model_of)

    def _at_best_rate(self, spec: RunSpec) -> RunSpec:
        """Return a run's spec; after the first repeat, with the strategy's best learning rate."""
        if not spec.rates or spec.repeat == 0:
            return spec
        runs = self.recorder.comparison.runs
        own = next(run.spec for run in runs if run.name == spec.strategy and run.spec)
        return replace(spec, learning_rate=own.learning_rate)

    def _model_of(self, run_id: str) -> Any:
        """Return a run's trained model.  Rank 0 keeps the model until the next comparison."""
        if self.cluster.is_over:
            raise UserError("The ranks that kept the model have ended. Train the model again.")
        (model,) = pull(self.cluster, run_id, [0], calls.pull_model)
        return model

    def _send_functions(self, rank: int) -> None:
        """Send the notebook's functions to a restarted rank if the comparison uses functions."""
        if self.asked.functions is not None:
            self.asked.functions.send(self.cluster, [rank])

    def _continue_without(self, failed: str, rest: Sequence[str]) -> bool:
        """Print which strategies train after ``failed`` failed; return False if none is left."""
        if not rest or self.stop_requested:
            return False
        names = ", ".join(dict.fromkeys(rest))
        if self.cluster.lost is not None:
            warn(f"Not trained: {names}.")
            return False
        warn(f"{failed} failed. ddpnb skips it and still trains {names}.")
        self._replace_dead(failed)
        return True

    def _train(self, spec: RunSpec) -> None:
        warn_stale(ensure_group(self.cluster))
        self.recorder.begin(spec.run_id, spec.strategy, spec)
        survives = self.checked[spec.strategy].survives_deaths
        dispensable = self.cluster.ranks[1:] if survives else ()
        recovery = RankRecovery(
            cluster=self.cluster,
            spec=spec,
            handle=self._handle,
            dispensable=dispensable,
            before_joining=self._send_functions,
        )
        self.printed.end()
        watch = Watch(
            cluster=self.cluster,
            call=self.cluster.submit(calls.train(spec, None), self.cluster.ranks),
            handle=recovery.take,
            tick=lambda: self._tick(recovery, watch),
            notify=warn,
            dispensable=dispensable,
        )
        self._interrupt_at = math.inf
        try:
            watch.run()
            if watch.stop_requested:
                raise KeyboardInterrupt
            recovery.end()
        except KeyboardInterrupt:
            recovery.stop()
            self.recorder.end(spec.run_id, *self._interrupted(_reports(watch)))
            _print_replaced(spec.strategy, recovery.restarted)
            raise CellInterrupt(kept(watch)) from None
        except Exception as failure:
            recovery.stop()
            self.recorder.end(spec.run_id, Status.FAILED, summary_of(failure))
            raise
        if (error := error_of(watch)) is not None:
            cause = watch.hang or _cause_of(error)
            self.recorder.end(spec.run_id, Status.FAILED, cause)
            if spec.kill and self._replace_dead(spec.strategy):
                return
            raise error
        if any(report.was_stopped for report in _reports(watch)):
            self.recorder.end(spec.run_id, Status.STOPPED, "stopped by the user")
        else:
            self.recorder.end(spec.run_id, Status.FINISHED)
        _print_replaced(spec.strategy, recovery.restarted)
        self._replace_dead(spec.strategy)

    def _interrupted(self, reports: Sequence[RunReport]) -> tuple[Status, str]:
        """Return the status and note of a run that was interrupted during or after its training."""
        if len(reports) < len(self.cluster.ranks) or any(each.was_stopped for each in reports):
            return Status.STOPPED, "interrupted"
        is_cut = any(each.evaluation_was_cut for each in reports)
        return Status.FINISHED, "the evaluation after training was interrupted" if is_cut else ""

    def _replace_dead(self, strategy: str) -> bool:
        """Restart the dead ranks and print their numbers; return True if a rank was restarted."""
        dead = self.cluster.dead
        if not dead or self.cluster.lost is not None:
            return False
        try:
            warn_stale(bring_back(self.cluster, dead))
        except UserError as error:
            if not self.cluster.spans_hosts:
                raise
            warn(f"{strategy}: {spoken_ranks(dead)} died. {error}")
            return False
        for rank in dead:
            self._send_functions(rank)
        _print_replaced(strategy, dead)
        return True

    def _tick(self, recovery: RankRecovery, watch: Watch) -> None:
        """Redraw the display.  If the user requests a stop, end all ranks after the same step."""
        recovery.attend()
        if self.live.is_due():
            self.live.update(self.recorder.comparison)
        if not self.stop_requested:
            return
        now = time.monotonic()
        self._interrupt_at = min(self._interrupt_at, now + FAILURE_SECONDS)
        if now >= self._interrupt_at:
            watch.stop_requested = True
        if now >= self._next_stop_at:
            self._next_stop_at = now + STOP_INTERVAL_SECONDS  # ranks ignore stops before step 1
            for rank in self.cluster.living:
                self.cluster.processes.command(rank, RankCommand.STOP)

    def _handle(self, event: CallEvent) -> None:
        if isinstance(event, Output):
            self.printed.take(event.rank, event.kind, event.content)
        elif isinstance(event, EventBatch):
            self.recorder.add(event)
        elif isinstance(event, Returned) and isinstance(event.value, RunReport):
            self.recorder.add_report(event.value)


def clean_up(cluster: Cluster) -> None:
    """Delete a comparison's data on the ranks that still answer."""
    if cluster.is_over:
        return
    with contextlib.suppress(UserError, RuntimeError, TimeoutError, KeyError):
        cluster.gather(calls.clean_up(), ranks=cluster.ready, timeout=CLEAN_UP_SECONDS)


def _print_replaced(strategy: str, dead: Collection[int]) -> None:
    if dead:
        now = f"ddpnb restarted {them(dead)} without variables"
        warn(f"{strategy}: {spoken_ranks(dead)} died, and {now}.")


def _reports(watch: Watch) -> list[RunReport]:
    return [each for each in watch.call.returned.values() if isinstance(each, RunReport)]


def _cause_of(error: Exception) -> str:
    return error.cause if isinstance(error, RankError) else str(error)
