"""The one training loop: how a run is trained and evaluated, whatever the strategy (ranks).

A run has these phases, in this order.  The clock runs in ``train``, and in ``finish`` where that
is a part of the training.

build     load the task and its data, and find out which ranks take part
rehearse  make a few steps with a throwaway, so that nothing is cold
prepare   set up the strategy, fault injection and the source of samples
barrier   let all ranks that take part start together
train     make the measured steps
finish    have the strategy return the trained model
evaluate  compute its loss and accuracy on rank 0, on training and held-out samples; and those of
          the copies that were made while it trained; save it where that is asked for
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.compat.torch_internals import group_store
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Checked, RankState, RejoinInfo, RunReport, RunSpec
from ddpnb.protocol.processes import atomic_write
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives.account import Account
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.servers.rendezvous import RunOverError, announce_failure
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.worker import Worker
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.tasks.samples import DataCache
from ddpnb.rank.training.context import CHECK, Content, RunContext, build_context, linked
from ddpnb.rank.training.evaluation import BATCHNORM_NOTE, Score, has_batchnorm
from ddpnb.rank.training.fault_injection import FaultInjector, measure_compute_seconds
from ddpnb.rank.training.loss_checks import BATCH_NOTE, depends_on_batch
from ddpnb.rank.training.rehearsal import rehearse, release_memory
from ddpnb.rank.training.requirements import check_strategy
from ddpnb.rank.training.run_metrics import Publish, RunMetrics, header_of
from ddpnb.rank.training.snapshots import Snapshots
from ddpnb.rank.training.timing import Clock, StepReport, clock_of
from ddpnb.rank.training.validation import (
    COLLECTIVES_NOTE,
    check_alone,
    check_evaluation,
    check_loading,
    check_own,
    check_training,
    collectives_refusal,
    seconds_per_judged,
    seconds_per_trained,
    with_place,
)

CHECKS = "checks"
"""The folder, in that of a run, of the files that a class of the user's own makes in its check."""

MIN_SECONDS_MARGIN = 1.1
"""By how much a run is planned longer than ``--min-seconds``."""
CEILING_SECONDS = 4.0
"""How long a rank trains a ceiling, if the run is as long."""
UNNAMED = "<comparison>"
"""What tracebacks call a comparison's cell that has no number."""


def validate(
    spec: RunSpec,
    *,
    state: RankState,
    namespace: Mapping[str, object],
    folder: Path = Path(),
    filename: str = UNNAMED,
    cache: DataCache | None = None,
    num_calls: Callable[[], int] = int,
) -> Checked:
    """Check a training before anything trains.

    Each rank may call it alone, as it sends nothing; only the user's own code may, such as a class
    or a step, and takes part with every rank of the group.  A class has its files in a folder of
    ``CHECKS``, which is removed once all ranks have checked.

    The arguments are those of ``run``; ``num_calls`` returns how many collectives this rank has
    called.

    Raises:
        UserError: one sentence that says what is wrong and what to do.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    with preserve_globals(torch.device(state.device)):
        try:
            checks = folder / CHECKS
            context = build_context(
                spec, state, namespace, folder=checks, filename=filename, cache=cache
            )
            return _checked(context, num_calls)
        except UserError as error:
            raise with_place(error, spec.cell, filename) from error.__cause__


def _checked(context: RunContext, num_calls: Callable[[], int]) -> Checked:
    worker = context.worker(CHECK, num_steps=1, is_grouped=False)
    batch = context.own_batch() if context.is_own else context.smallest_batch()
    notes: tuple[str, ...] = ()
    skips_loss = False
    num_before = num_calls()
    if context.is_own:
        check_own(worker, batch, context.strategy())
    else:
        check_training(worker, batch, context.spec.strategy)
        check_strategy(context.spec.strategy, worker)
        if depends_on_batch(worker, context.few_samples()) and context.plan.num_workers > 1:
            notes = (BATCH_NOTE,)
        skips_loss = num_calls() > num_before
        if skips_loss:
            notes += (COLLECTIVES_NOTE,)
    if context.prefetches and context.device.type == "cuda":
        check_loading(context)
    trained = 0.0
    if not context.is_own:  # on all ranks at once, as they train
        trained = seconds_per_trained(worker, context.usual_batch())
    refusal = collectives_refusal(context) if skips_loss else ""
    score, judged = Score(), 0.0
    if context.is_evaluated and not refusal:  # on all ranks: the user's measures may call them all
        num_before = num_calls()
        has_loss = context.has_loss and not skips_loss
        score = check_evaluation(worker, context.task, batch.num_samples, has_loss=has_loss)
        judged = seconds_per_judged(context, worker, has_loss=has_loss)
        check_alone(num_calls() - num_before)
    return Checked(
        num_samples=len(context.task.train),
        survives_deaths=context.plan.survives_deaths,
        has_accuracy=not math.isnan(score.accuracy),
        num_epochs=_num_epochs(context, worker),
        notes=notes,
        num_held_out=len(context.task.held_out),
        seconds_per_judged=judged,
        seconds_per_trained=trained,
        skips_loss=skips_loss,
        refusal=refusal,
    )


def _num_epochs(context: RunContext, worker: Worker) -> float:
    """Return after how many epochs a run has lasted for ``min_seconds``, by its quickest steps.

    A step of the run also updates and communicates, and so takes longer than these.
    """
    if context.spec.min_seconds is None or context.is_own:
        return 0.0
    seconds = measure_compute_seconds(worker, context.usual_batch(), min)
    num_steps = MIN_SECONDS_MARGIN * context.spec.min_seconds / seconds
    return num_steps / context.schedule.steps_per_epoch


def run(
    spec: RunSpec,
    *,
    state: RankState,
    folder: Path,
    publish: Publish,
    namespace: Mapping[str, object],
    should_stop: Callable[[], bool],
    expects_stop: Callable[[], bool] | None = None,
    filename: str = UNNAMED,
    rejoin_info: RejoinInfo | None = None,
    cancellation: CancellationToken | None = None,
    cache: DataCache | None = None,
    keep: Callable[[nn.Module], None] = lambda _: None,
) -> RunReport:
    """Train and evaluate one run.  Takes part: every rank of the default process group.

    Ranks that the strategy does not use return at once.

    Args:
        spec: the training.
        state: where this rank lives.
        folder: a private directory that all ranks of this host share, for sockets and
            shared memory; the run leaves nothing in it.
        publish: takes the header (on rank 0, before the first step) and an event for each step.
        namespace: the user's variables on this rank; left as they are.
        should_stop: called before each step; if it is true on one rank, the run ends on all.
        expects_stop: the same on every rank, some time before: only then do ranks of several hosts
            look for the last step; None: all ranks are on one host.
        filename: what tracebacks call the comparison's cell.
        rejoin_info: where this rank joins if the others train already; it is in no group then.
        cancellation: ends waits that are not the group's.
        cache: keeps the data between the runs of a comparison.
        keep: takes the trained model, on rank 0, before it is evaluated.

    Raises:
        UserError: what ``validate`` would have refused.
        RuntimeError: another rank left in the middle of the run.
    """
    with preserve_globals(torch.device(state.device)), contextlib.ExitStack() as opened:
        # -- build ------------------------------------------------------------------------
        context = build_context(
            spec,
            state,
            namespace,
            folder=folder,
            filename=filename,
            cancellation=cancellation,
            rejoin_info=rejoin_info,
            cache=cache,
        )
        no_part = RunReport(run_id=spec.run_id, rank=state.rank, took_part=False)
        if state.rank >= context.plan.num_ranks:
            return no_part
        context = opened.enter_context(linked(context))
        if rejoin_info is not None:
            try:
                return _perform(context, publish, should_stop, expects_stop, keep)
            except RunOverError:
                return no_part
        opened.callback(release_memory, context.device)
        # -- rehearse ... evaluate --------------------------------------------------------
        with _announced_failure(context, "t"):
            return _perform(context, publish, should_stop, expects_stop, keep)


def _announced_failure(context: RunContext, phase: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that notifies the ranks that would wait for this one if a phase fails."""
    if context.plan.synchronous or context.plan.num_ranks == 1:
        return contextlib.nullcontext()
    return announce_failure(context.name(phase), context.state.rank)


def _perform(
    context: RunContext,
    publish: Publish,
    should_stop: Callable[[], bool],
    expects_stop: Callable[[], bool] | None,
    keep: Callable[[nn.Module], None],
) -> RunReport:
    spec, plan = context.spec, context.plan
    metrics = RunMetrics(context=context, publish=publish, clock=clock_of(context.device))
    with contextlib.ExitStack() as opened:
        # -- rehearse ---------------------------------------------------------------------
        step_seconds = rehearse(context)
        # -- prepare ----------------------------------------------------------------------
        fault_injector = _fault_injector(context, metrics)
        strategy = opened.enter_context(closing(context.strategy()))
        stop = Stop(context, metrics.clock, should_stop, expects_stop)
        opened.callback(stop.close)
        worker = context.worker(
            "t", num_steps=context.num_steps, timer=metrics.clock, delay=fault_injector.delay
        )
        strategy.setup(worker)
        is_averaged = plan.averages_weights and plan.num_workers > 1
        is_estimated = is_averaged and has_batchnorm(worker.model)
        snapshots = Snapshots(metrics, strategy, worker, lambda: _untimed(context, metrics.clock))
        notes = snapshots.notes + ((BATCHNORM_NOTE,) if is_estimated else ())
        num_steps = context.num_steps
        if spec.is_ceiling:
            num_steps = _num_ceiling_steps(num_steps, step_seconds)
        if context.state.rank == 0:
            publish(header_of(context, worker, num_steps=num_steps, notes=notes))
        source = opened.enter_context(context.source(strategy))
        # -- barrier ----------------------------------------------------------------------
        _barrier(context)
        # -- train ------------------------------------------------------------------------
        if not plan.synchronous:
            source = metrics.recorded(source)
        with listening(Account(worker.meter)):
            _train(metrics, strategy, worker, source, stop, fault_injector, snapshots)
            metrics.memory = strategy.memory()
            metrics.note_peak()
            # -- finish -------------------------------------------------------------------
            model = strategy.finish()  # waits for all: only then may the stop file be removed
        if plan.finish_is_timed:
            metrics.clock.end()
        if not metrics.was_stopped:
            snapshots.average()
        num_lost = sum(len(context.indices(shard)) for shard in strategy.lost_shards())
    # -- evaluate -------------------------------------------------------------------------
    if context.state.rank != 0 or spec.is_ceiling:
        return metrics.report()
    if is_estimated:
        metrics.estimate_batchnorm(model)
    keep(model)
    report = replace(metrics.report(), num_lost_samples=num_lost)
    _save(model, metrics)
    metrics.num_to_judge = 2 + snapshots.num_kept
    try:
        held_out = metrics.score(model, is_held_out=True)
        report = replace(
            report,
            held_out_loss=held_out.loss,
            held_out_accuracy=held_out.accuracy,
            held_out_metrics=held_out.metrics,
            num_held_out=held_out.num_samples,
        )
        report = replace(report, final_loss=metrics.score(model, is_held_out=False).loss)
        is_judged = not math.isnan(held_out.loss) or not math.isnan(held_out.accuracy)
        if is_judged and not metrics.was_stopped:
            curve = snapshots.evaluations(model, should_stop, is_estimated)
            report = replace(report, evaluations=curve)
    except KeyboardInterrupt:  # what is known by now is kept, the whole training above all
        report = replace(report, evaluation_was_cut=True)
    return report


@contextlib.contextmanager
def _untimed(context: RunContext, clock: Clock) -> Iterator[None]:
    """Stop the clock of synchronous workers until the slowest has left the context.

    Asynchronous workers train on meanwhile, so rank 0's clock runs.
    """
    if not context.plan.synchronous:
        yield
        return
    with clock.paused():
        yield
        if context.plan.num_steps_ahead == 0 and not context.plan.never_waits:
            _barrier(context)


def _save(model: nn.Module, metrics: RunMetrics) -> None:
    """Write the trained weights, if that is asked for; mark the run where the disk refuses."""
    path = metrics.context.spec.model_file
    if path is None:
        return
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content.getbuffer())
    except OSError as error:
        metrics.mark(f"its weights are not saved: {error.strerror or error}")


def _num_ceiling_steps(most: int, step_seconds: float) -> int:
    """Return about how many steps a ceiling will make, by those of the rehearsal."""
    return min(most, math.ceil(CEILING_SECONDS / step_seconds)) if step_seconds > 0 else most


def _fault_injector(context: RunContext, metrics: RunMetrics) -> FaultInjector:
    def compute_seconds() -> float:
        alone = context.worker("m", num_steps=1, is_grouped=False)
        return measure_compute_seconds(alone, context.usual_batch())

    return FaultInjector(
        context.spec,
        context.workers,
        is_new=context.rejoin_info is None,
        compute_seconds=compute_seconds,
        device=context.device,
        timer=metrics.clock,
        publish=metrics.publish,
    )


def _barrier(context: RunContext) -> None:
    """Wait for the other ranks.  Takes part: every rank of the plan, which is one or all."""
    if context.plan.num_ranks == 1 or context.rejoin_info is not None:
        return
    device_ids = [context.device.index] if context.state.backend == "nccl" else None
    dist.barrier(device_ids=device_ids)


def _train(
    metrics: RunMetrics,
    strategy: Strategy,
    worker: Worker,
    source: Iterator[tuple[Shard, Content]],
    stop: Stop,
    fault_injector: FaultInjector,
    snapshots: Snapshots,
) -> None:
    """Make the measured steps: all of them, or those before a stop."""
    context, clock = metrics.context, metrics.clock
    most_seconds = CEILING_SECONDS if context.spec.is_ceiling else math.inf
    metrics.start()
    fault_injector.begin()
    for step, (shard, content) in enumerate(source):
        if stop.before(step):
            metrics.was_stopped = True
            break
        context.cancellation.check(is_waiting=False)  # a strategy may never wait for the others
        batch = context.batch(shard, content)
        if fault_injector.is_kill_due:
            metrics.add(clock.stop())  # steps that a GPU has yet to finish
            fault_injector.kill()
        fault_injector.begin_step()
        loss = strategy.step(batch)
        fault_injector.delay()  # if the strategy itself has not called it
        traffic, numbers = worker.meter.take(), worker.take_metrics()
        report = StepReport(loss, batch.num_samples, traffic, worker.staleness, numbers)
        metrics.add(clock.timing(report))
        snapshots.after(shard)
        if clock.seconds >= most_seconds:  # without the other ranks, which a ceiling has none of
            break
    metrics.add(clock.stop())


class Stop:
    """The step before which all ranks of a run stop, without a message per step.

    The first rank that is asked to stop chooses the step before which all ranks stop.  It writes
    the number to a file in the folder that all ranks of the host share.  Each rank looks for the
    file before each step, which takes microseconds.

    A synchronous step ends on no rank before every rank has begun it.  So a rank is at most
    ``num_steps_ahead`` steps ahead of the writer (0 on a CPU, a few on a GPU, see ``timing``).
    Within twice as many steps, every rank has looked for the file at least once.  No rank is past
    the chosen step by then, and none misses the file before it is removed.  Workers that never wait
    for each other stop each for itself, as soon as they see the file.

    Ranks of several hosts have the process group's store in place of the file.  Looking takes a
    message there, so they look only from when they expect a stop, all of them before one is asked.

    Args:
        context: the run.
        clock: the run's.
        wanted: returns whether this rank has been asked to stop.
        expected: returns whether this rank is to look; None: all ranks are on one host.
    """

    def __init__(
        self,
        context: RunContext,
        clock: Clock,
        wanted: Callable[[], bool],
        expected: Callable[[], bool] | None = None,
    ) -> None:
        plan = context.plan
        self._path = context.folder / f"{context.name('t')}.stop"
        self._is_in_step = plan.synchronous and not plan.never_waits
        self._margin = 2 * (clock.num_steps_ahead + plan.num_steps_ahead + 1)
        self._wanted = wanted
        self._expected = expected
        self._last: int | None = None

    def before(self, step: int) -> bool:
        """Return whether to stop before this step, which this rank has not begun."""
        if self._last is None and self._wanted():
            self._announce(step + self._margin)
        if self._last is None:
            self._last = self._read()
        return self._last is not None and (not self._is_in_step or step >= self._last)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _announce(self, step: int) -> None:
        """Write the step unless another rank was first; the file appears with its content."""
        if self._expected is not None:
            group_store().compare_set(self._path.name, "", str(step))
            return
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(str(step))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._path)
        draft.unlink()

    def _read(self) -> int | None:
        if self._expected is not None:
            is_there = self._expected() and group_store().check([self._path.name])
            return int(group_store().get(self._path.name)) if is_there else None
        if not self._path.exists():
            return None
        return int(self._path.read_text())
