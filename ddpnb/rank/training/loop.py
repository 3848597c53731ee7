"""How is one run trained and judged, whatever the strategy?  (Every rank.)

Phases, in this order; the clock runs in ``train`` only:

build     the task, its data, and who takes part
rehearse  a few steps on a throwaway replica, so that nothing measured is cold
barrier   all who take part start together
train     the measured steps
finish    the strategy hands back the trained model
evaluate  rank 0 judges it, on training and held-out samples
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ddpnb.protocol.messages import Checked, RankState, RejoinInfo, RunReport, RunSpec
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.messages import RunOverError
from ddpnb.rank.comm.rendezvous import announce_failure
from ddpnb.rank.random_state import preserve_rng
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.timer import NullTimer
from ddpnb.rank.training import checkpoint_compat, fault_injection
from ddpnb.rank.training.checkpoint_callback import CheckpointCallback, set_up
from ddpnb.rank.training.context import RunContext, build
from ddpnb.rank.training.evaluation import evaluate
from ddpnb.rank.training.fault_injection import FaultInjector
from ddpnb.rank.training.loader import Source
from ddpnb.rank.training.run_metrics import Publish, RunMetrics, header_of
from ddpnb.rank.training.stop import Stop
from ddpnb.rank.training.timing import Clock, clock_of
from ddpnb.rank.training.validation import check_dense, check_evaluation, check_training

UNNAMED = "<comparison>"
"""What a comparison's cell is called in tracebacks where it has no number."""


def check(
    spec: RunSpec,
    *,
    state: RankState,
    namespace: Mapping[str, object],
    filename: str = UNNAMED,
) -> Checked:
    """Refuse what cannot be trained, before anything trains.

    Every rank may call it alone: nothing is sent.

    Args:
        spec: the training to check.
        state: where this rank lives.
        namespace: the user's variables on this rank; left as they are.
        filename: what tracebacks call the comparison's cell.

    Raises:
        UserError: one sentence that says what is wrong and what to do.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    with preserve_rng(torch.device(state.device)):
        context = build(spec, state, namespace, filename=filename)
        replica = context.replica("check", num_steps=1, timer=NullTimer(), is_grouped=False)
        strategy = context.strategy()
        batch = context.smallest_batch(strategy)
        check_training(replica, batch)
        check_dense(replica, spec.strategy)
        strategy.check(replica)
        if state.rank == 0:
            check_evaluation(replica, context.task, batch.num_samples)
        if context.saved is not None:
            checkpoint_compat.check_replica(replica, context.saved)
        return Checked(
            num_samples=len(context.task.train), survives_deaths=context.plan.survives_deaths
        )


def run(
    spec: RunSpec,
    *,
    state: RankState,
    folder: Path,
    publish: Publish,
    namespace: Mapping[str, object],
    should_stop: Callable[[], bool],
    filename: str = UNNAMED,
    rejoin_info: RejoinInfo | None = None,
    cancellation: CancellationToken | None = None,
) -> RunReport:
    """Train and judge one run; takes part: every rank of the default process group.

    Ranks that the strategy does not use return at once.

    Args:
        spec: the training.
        state: where this rank lives.
        folder: a private directory that all ranks of this host share, for sockets and
            shared memory; nothing of this run is left in it.
        publish: takes the header (rank 0's, before the first step) and an event for each step.
        namespace: the user's variables on this rank; left as they are.
        should_stop: asked before each step; one rank's yes ends the run on all of them.
        filename: what tracebacks call the comparison's cell.
        rejoin_info: where this rank comes in, if the others train already; it is in no group then.
        cancellation: frees this rank from waits that are not its group's.

    Raises:
        UserError: what ``check`` would have refused.
        RuntimeError: another rank left in the middle of the run.
    """
    with preserve_rng(torch.device(state.device)):
        context = build(
            spec, state, namespace, folder=folder, filename=filename, cancellation=cancellation
        )
        if state.rank >= context.plan.num_ranks:
            return RunReport(run_id=spec.run_id, rank=state.rank, took_part=False)
        if rejoin_info is not None:
            return _join(replace(context, rejoin_info=rejoin_info), publish, should_stop)
        with _announce_failure(context, "r"):
            _rehearse(context)
        with _announce_failure(context, "t"):
            return _perform(context, publish, should_stop)


def _join(context: RunContext, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    # join: nothing that needs the others, who do not wait; there may be none any more
    try:
        return _perform(context, publish, should_stop)
    except RunOverError:
        return RunReport(run_id=context.spec.run_id, rank=context.state.rank, took_part=False)


def _announce_failure(context: RunContext, phase: str) -> contextlib.AbstractContextManager[None]:
    """Where a phase fails, tell those who would wait for this rank in vain."""
    if context.plan.synchronous or context.plan.num_ranks == 1:
        return contextlib.nullcontext()
    return announce_failure(context.name(phase), context.state.rank, context.folder)


def _rehearse(context: RunContext) -> None:
    # rehearse: with its own replica, optimizer and files, of which nothing is kept
    num_steps = min(context.spec.num_warmup_steps, context.num_steps)
    if num_steps == 0:
        return
    clock = clock_of(context.device)
    with closing(context.strategy()) as strategy:
        strategy.setup(context.replica("r", num_steps=num_steps, timer=clock))
        clock.start()
        for shard, pair in context.direct(strategy).pairs():
            clock.timing(strategy.step(context.batch(shard, pair)))
        clock.stop()
        strategy.finish()


def _perform(context: RunContext, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    metrics = RunMetrics(context=context, publish=publish, clock=clock_of(context.device))
    with contextlib.ExitStack() as opened:
        course = _prepare(context, metrics, should_stop, opened)
        _barrier(context)
        _train(course)
        metrics.memory = course.strategy.memory()
        # finish: waits for all; only then may the file go that tells them to stop
        model = course.strategy.finish()
        if not metrics.was_stopped:
            course.callback.end()
        lost = sum(len(context.indices(shard)) for shard in course.strategy.lost_shards())
    # evaluate
    if context.state.rank != 0:
        return metrics.report()
    course.callback.finish(model)
    evaluation = evaluate(model, context.task, context.device, failed=metrics.mark)
    return metrics.report(
        final_loss=evaluation.train.loss,
        held_out_loss=evaluation.held_out.loss,
        held_out_accuracy=evaluation.held_out.accuracy,
        num_lost_samples=lost,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """All that is at hand while a run is trained."""

    context: RunContext
    strategy: Strategy
    source: Source
    stop: Stop
    late: FaultInjector
    callback: CheckpointCallback
    metrics: RunMetrics


def _prepare(
    context: RunContext,
    metrics: RunMetrics,
    should_stop: Callable[[], bool],
    opened: contextlib.ExitStack,
) -> _Course:
    """Set everything up; ``opened`` lets go of it."""
    faults = fault_injection.faults_of(
        context.spec, context.workers, is_new=context.rejoin_info is None
    )
    seconds = _compute_seconds(context) if faults.need_compute_seconds else 0.0
    strategy = opened.enter_context(closing(context.strategy()))
    stop = opened.enter_context(closing(_stop_of(context, metrics.clock, should_stop)))
    late = FaultInjector(
        faults,
        compute_seconds=seconds,
        device=context.device,
        timer=metrics.clock,
        publish=metrics.publish,
    )
    replica = context.replica(
        "t",
        num_steps=context.num_steps,
        first_step=context.first_step,
        timer=metrics.clock,
        delay=late.delay,
    )
    num_parameters = sum(parameter.numel() for parameter in replica.model.parameters())
    set_up(context, strategy, replica)
    if context.state.rank == 0:
        metrics.publish(header_of(context, num_parameters, strategy.notes()))
    return _Course(
        context=context,
        strategy=strategy,
        source=opened.enter_context(closing(context.source(strategy))),
        stop=stop,
        late=late,
        callback=CheckpointCallback(
            context=context,
            strategy=strategy,
            replica=replica,
            clock=metrics.clock,
            meet=lambda: _barrier(context),
            tell=metrics.mark,
        ),
        metrics=metrics,
    )


def _compute_seconds(context: RunContext) -> float:
    """Return what one worker's own computing takes in one step, on a throwaway replica."""
    alone = context.replica("m", num_steps=1, timer=NullTimer(), is_grouped=False)
    return fault_injection.measure(alone, context.usual_batch())


def _stop_of(context: RunContext, clock: Clock, should_stop: Callable[[], bool]) -> Stop:
    return Stop(
        context.folder,
        context.name("t"),
        synchronous=context.plan.synchronous,
        num_steps_ahead=clock.num_steps_ahead + context.plan.num_steps_ahead,
        wanted=should_stop,
    )


def _barrier(context: RunContext) -> None:
    # barrier: takes part: every rank of the plan, which is one or all
    if context.plan.num_ranks == 1 or context.rejoin_info is not None:
        return
    device_ids = [context.device.index] if context.state.backend == "nccl" else None
    dist.barrier(device_ids=device_ids)


def _train(course: _Course) -> None:
    # train
    metrics, context = course.metrics, course.context
    metrics.start()
    course.late.begin()
    for step, (shard, pair) in enumerate(course.source.pairs()):
        if course.stop.before(step):
            metrics.was_stopped = True
            break
        context.cancellation.check(
            is_waiting=False
        )  # who seldom waits, or never, ends with the others
        batch = context.batch(shard, pair)
        if course.late.is_kill_due:
            metrics.add(metrics.clock.stop())  # steps that a GPU has yet to finish
            course.late.kill()
        course.late.begin_step()
        report = course.strategy.step(batch)
        course.late.delay()  # here where the strategy computes in a way of its own
        metrics.add(metrics.clock.timing(report))
        course.callback.after(shard)
    metrics.add(metrics.clock.stop())
