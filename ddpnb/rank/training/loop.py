"""The one training loop: how a run is trained and evaluated, whatever the strategy (ranks).

A run has these phases, in this order.  The clock runs in ``train`` only.

build     load the task and its data, and find out which ranks take part
rehearse  make a few steps on a throwaway replica, so that nothing is cold when it is measured
prepare   set up the strategy, fault injection, checkpoints and the source of samples
barrier   let all ranks that take part start together
train     make the measured steps
finish    have the strategy return the trained model
evaluate  compute its loss and accuracy on rank 0, on training and held-out samples
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ddpnb.protocol.messages import Checked, RankState, RejoinInfo, RunReport, RunSpec
from ddpnb.rank.comm.rendezvous import CancellationToken, RunOverError, announce_failure
from ddpnb.rank.random_state import preserve_rng
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.timer import NullTimer
from ddpnb.rank.training import checkpoint_compat
from ddpnb.rank.training.checkpoint_callback import CheckpointCallback, set_up
from ddpnb.rank.training.context import RunContext, build_context
from ddpnb.rank.training.evaluation import evaluate
from ddpnb.rank.training.fault_injection import (
    FaultInjector,
    faults_of,
    measure_compute_seconds,
)
from ddpnb.rank.training.loader import Source
from ddpnb.rank.training.run_metrics import Publish, RunMetrics, header_of
from ddpnb.rank.training.stop import Stop
from ddpnb.rank.training.timing import Clock, clock_of
from ddpnb.rank.training.validation import check_dense, check_evaluation, check_training

UNNAMED = "<comparison>"
"""What tracebacks call a comparison's cell that has no number."""


def check(
    spec: RunSpec,
    *,
    state: RankState,
    namespace: Mapping[str, object],
    filename: str = UNNAMED,
) -> Checked:
    """Check a training before anything trains.

    Each rank may call it alone: it sends nothing.

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
        context = build_context(spec, state, namespace, filename=filename)
        replica = context.replica("check", num_steps=1, timer=NullTimer(), is_grouped=False)
        strategy = context.strategy()
        batch = context.smallest_batch(strategy)
        check_training(replica, batch)
        check_dense(replica, spec.strategy)
        strategy.check(replica)
        if state.rank == 0:
            check_evaluation(replica, context.task, batch.num_samples)
        if context.checkpoint is not None:
            checkpoint_compat.check_replica(replica, context.checkpoint)
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
        filename: what tracebacks call the comparison's cell.
        rejoin_info: where this rank joins if the others train already; it is in no group then.
        cancellation: ends waits that are not the group's.

    Raises:
        UserError: what ``check`` would have refused.
        RuntimeError: another rank left in the middle of the run.
    """
    with preserve_rng(torch.device(state.device)):
        # -- build ------------------------------------------------------------------------
        context = build_context(
            spec, state, namespace, folder=folder, filename=filename, cancellation=cancellation
        )
        if state.rank >= context.plan.num_ranks:
            return RunReport(run_id=spec.run_id, rank=state.rank, took_part=False)
        if rejoin_info is not None:
            return _rejoin(replace(context, rejoin_info=rejoin_info), publish, should_stop)
        # -- rehearse ---------------------------------------------------------------------
        with _announced_failure(context, "r"):
            _rehearse(context)
        # -- prepare ... evaluate ---------------------------------------------------------
        with _announced_failure(context, "t"):
            return _perform(context, publish, should_stop)


def _rejoin(context: RunContext, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    """Join a run that the others train already: no rehearsal, for they do not wait."""
    try:
        return _perform(context, publish, should_stop)
    except RunOverError:
        return RunReport(run_id=context.spec.run_id, rank=context.state.rank, took_part=False)


def _announced_failure(context: RunContext, phase: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that notifies the ranks that would wait for this one if a phase fails."""
    if context.plan.synchronous or context.plan.num_ranks == 1:
        return contextlib.nullcontext()
    return announce_failure(context.name(phase), context.state.rank)


def _rehearse(context: RunContext) -> None:
    """Make a few steps with a replica, an optimizer and files that are then thrown away."""
    num_steps = min(context.spec.num_warmup_steps, context.num_steps)
    if num_steps == 0:
        return
    clock = clock_of(context.device)
    with closing(context.strategy()) as strategy:
        strategy.setup(context.replica("r", num_steps=num_steps, timer=clock))
        clock.start()
        for shard, pair in context.inline_source(strategy).pairs():
            clock.timing(strategy.step(context.batch(shard, pair)))
        clock.stop()
        strategy.finish()


def _perform(context: RunContext, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    metrics = RunMetrics(context=context, publish=publish, clock=clock_of(context.device))
    with contextlib.ExitStack() as opened:
        # -- prepare ----------------------------------------------------------------------
        prepared = _prepare(context, metrics, should_stop, opened)
        # -- barrier ----------------------------------------------------------------------
        _barrier(context)
        # -- train ------------------------------------------------------------------------
        _train(context, prepared, metrics)
        metrics.memory = prepared.strategy.memory()
        # -- finish -----------------------------------------------------------------------
        model = prepared.strategy.finish()  # waits for all: only then may the stop file be removed
        if not metrics.was_stopped:
            prepared.callback.end()
        num_lost = sum(len(context.indices(shard)) for shard in prepared.strategy.lost_shards())
    # -- evaluate -------------------------------------------------------------------------
    if context.state.rank != 0:
        return metrics.report()
    prepared.callback.finish(model)
    evaluation = evaluate(model, context.task, context.device, failed=metrics.mark)
    return metrics.report(
        final_loss=evaluation.train.loss,
        held_out_loss=evaluation.held_out.loss,
        held_out_accuracy=evaluation.held_out.accuracy,
        num_lost_samples=num_lost,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What the measured steps use."""

    strategy: Strategy
    source: Source
    stop: Stop
    fault_injector: FaultInjector
    callback: CheckpointCallback


def _prepare(
    context: RunContext,
    metrics: RunMetrics,
    should_stop: Callable[[], bool],
    opened: contextlib.ExitStack,
) -> _Prepared:
    """Set everything up; ``opened`` closes it."""
    fault_injector = _fault_injector(context, metrics)
    strategy = opened.enter_context(closing(context.strategy()))
    stop = opened.enter_context(closing(_stop(context, metrics.clock, should_stop)))
    replica = context.replica(
        "t",
        num_steps=context.num_steps,
        first_step=context.first_step,
        timer=metrics.clock,
        delay=fault_injector.delay,
    )
    num_parameters = sum(parameter.numel() for parameter in replica.model.parameters())
    set_up(context, strategy, replica)
    if context.state.rank == 0:
        metrics.publish(header_of(context, num_parameters, strategy.notes()))
    callback = CheckpointCallback(
        context=context,
        strategy=strategy,
        replica=replica,
        clock=metrics.clock,
        barrier=lambda: _barrier(context),
        warn=metrics.mark,
    )
    source = opened.enter_context(closing(context.source(strategy)))
    return _Prepared(
        strategy=strategy,
        source=source,
        stop=stop,
        fault_injector=fault_injector,
        callback=callback,
    )


def _fault_injector(context: RunContext, metrics: RunMetrics) -> FaultInjector:
    faults = faults_of(context.spec, context.workers, is_new=context.rejoin_info is None)
    seconds = 0.0
    if faults.need_compute_seconds:
        alone = context.replica("m", num_steps=1, timer=NullTimer(), is_grouped=False)
        seconds = measure_compute_seconds(alone, context.usual_batch())
    return FaultInjector(
        faults,
        compute_seconds=seconds,
        device=context.device,
        timer=metrics.clock,
        publish=metrics.publish,
    )


def _stop(context: RunContext, clock: Clock, should_stop: Callable[[], bool]) -> Stop:
    return Stop(
        context.folder,
        context.name("t"),
        synchronous=context.plan.synchronous,
        num_steps_ahead=clock.num_steps_ahead + context.plan.num_steps_ahead,
        wanted=should_stop,
    )


def _barrier(context: RunContext) -> None:
    """Wait for the other ranks.  Takes part: every rank of the plan, which is one or all."""
    if context.plan.num_ranks == 1 or context.rejoin_info is not None:
        return
    device_ids = [context.device.index] if context.state.backend == "nccl" else None
    dist.barrier(device_ids=device_ids)


def _train(context: RunContext, prepared: _Prepared, metrics: RunMetrics) -> None:
    """Make the measured steps: all of them, or those before a stop."""
    clock, fault_injector = metrics.clock, prepared.fault_injector
    metrics.start()
    fault_injector.begin()
    for step, (shard, pair) in enumerate(prepared.source.pairs()):
        if prepared.stop.before(step):
            metrics.was_stopped = True
            break
        context.cancellation.check(is_waiting=False)  # a strategy may never wait for the others
        batch = context.batch(shard, pair)
        if fault_injector.is_kill_due:
            metrics.add(clock.stop())  # steps that a GPU has yet to finish
            fault_injector.kill()
        fault_injector.begin_step()
        report = prepared.strategy.step(batch)
        fault_injector.delay()  # if the strategy itself has not called it
        metrics.add(clock.timing(report))
        prepared.callback.after(shard)
    metrics.add(clock.stop())
