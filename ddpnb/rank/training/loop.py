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

from ddpnb.protocol.messages import Checked, Joining, RankState, RunReport, RunSpec
from ddpnb.rank.cancellation import Lifeline
from ddpnb.rank.comm.messages import RunOverError
from ddpnb.rank.comm.rendezvous import excused
from ddpnb.rank.random_state import untouched
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.timer import Untimed
from ddpnb.rank.training import checkpoint_compat, fault_injection
from ddpnb.rank.training.checkpoint_callback import Keeper, set_up
from ddpnb.rank.training.context import Stage, build
from ddpnb.rank.training.evaluation import evaluate
from ddpnb.rank.training.fault_injection import Drag
from ddpnb.rank.training.loader import Source
from ddpnb.rank.training.run_metrics import Publish, Tally, header_of
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
    with untouched(torch.device(state.device)):
        stage = build(spec, state, namespace, filename=filename)
        replica = stage.replica("check", num_steps=1, timer=Untimed(), is_grouped=False)
        strategy = stage.strategy()
        batch = stage.smallest_batch(strategy)
        check_training(replica, batch)
        check_dense(replica, spec.strategy)
        strategy.check(replica)
        if state.rank == 0:
            check_evaluation(replica, stage.task, batch.num_samples)
        if stage.saved is not None:
            checkpoint_compat.check_replica(replica, stage.saved)
        return Checked(
            num_samples=len(stage.task.train), survives_deaths=stage.plan.survives_deaths
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
    joining: Joining | None = None,
    lifeline: Lifeline | None = None,
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
        joining: where this rank comes in, if the others train already; it is in no group then.
        lifeline: frees this rank from waits that are not its group's.

    Raises:
        UserError: what ``check`` would have refused.
        RuntimeError: another rank left in the middle of the run.
    """
    with untouched(torch.device(state.device)):
        stage = build(spec, state, namespace, folder=folder, filename=filename, lifeline=lifeline)
        if state.rank >= stage.plan.num_ranks:
            return RunReport(run_id=spec.run_id, rank=state.rank, took_part=False)
        if joining is not None:
            return _join(replace(stage, joining=joining), publish, should_stop)
        with _excused(stage, "r"):
            _rehearse(stage)
        with _excused(stage, "t"):
            return _perform(stage, publish, should_stop)


def _join(stage: Stage, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    # join: nothing that needs the others, who do not wait; there may be none any more
    try:
        return _perform(stage, publish, should_stop)
    except RunOverError:
        return RunReport(run_id=stage.spec.run_id, rank=stage.state.rank, took_part=False)


def _excused(stage: Stage, phase: str) -> contextlib.AbstractContextManager[None]:
    """Where a phase fails, tell those who would wait for this rank in vain."""
    if stage.plan.synchronous or stage.plan.num_ranks == 1:
        return contextlib.nullcontext()
    return excused(stage.name(phase), stage.state.rank, stage.folder)


def _rehearse(stage: Stage) -> None:
    # rehearse: with its own replica, optimizer and files, of which nothing is kept
    num_steps = min(stage.spec.num_warmup_steps, stage.num_steps)
    if num_steps == 0:
        return
    clock = clock_of(stage.device)
    with closing(stage.strategy()) as strategy:
        strategy.setup(stage.replica("r", num_steps=num_steps, timer=clock))
        clock.start()
        for share, pair in stage.direct(strategy).pairs():
            clock.lap(strategy.step(stage.batch(share, pair)))
        clock.stop()
        strategy.finish()


def _perform(stage: Stage, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    tally = Tally(stage=stage, publish=publish, clock=clock_of(stage.device))
    with contextlib.ExitStack() as opened:
        course = _prepare(stage, tally, should_stop, opened)
        _barrier(stage)
        _train(course)
        tally.memory = course.strategy.memory()
        # finish: waits for all; only then may the file go that tells them to stop
        model = course.strategy.finish()
        if not tally.was_stopped:
            course.keeper.end()
        lost = sum(len(stage.indices(share)) for share in course.strategy.lost_shares())
    # evaluate
    if stage.state.rank != 0:
        return tally.report()
    course.keeper.finish(model)
    verdict = evaluate(model, stage.task, stage.device, failed=tally.mark)
    return tally.report(
        final_loss=verdict.train.loss,
        held_out_loss=verdict.held_out.loss,
        held_out_accuracy=verdict.held_out.accuracy,
        num_lost_samples=lost,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """All that is at hand while a run is trained."""

    stage: Stage
    strategy: Strategy
    source: Source
    stop: Stop
    late: Drag
    keeper: Keeper
    tally: Tally


def _prepare(
    stage: Stage,
    tally: Tally,
    should_stop: Callable[[], bool],
    opened: contextlib.ExitStack,
) -> _Course:
    """Set everything up; ``opened`` lets go of it."""
    faults = fault_injection.faults_of(stage.spec, stage.workers, is_new=stage.joining is None)
    seconds = _compute_seconds(stage) if faults.need_compute_seconds else 0.0
    strategy = opened.enter_context(closing(stage.strategy()))
    stop = opened.enter_context(closing(_stop_of(stage, tally.clock, should_stop)))
    late = Drag(
        faults,
        compute_seconds=seconds,
        device=stage.device,
        timer=tally.clock,
        publish=tally.publish,
    )
    replica = stage.replica(
        "t",
        num_steps=stage.num_steps,
        first_step=stage.first_step,
        timer=tally.clock,
        delay=late.delay,
    )
    num_parameters = sum(parameter.numel() for parameter in replica.model.parameters())
    set_up(stage, strategy, replica)
    if stage.state.rank == 0:
        tally.publish(header_of(stage, num_parameters, strategy.notes()))
    return _Course(
        stage=stage,
        strategy=strategy,
        source=opened.enter_context(closing(stage.source(strategy))),
        stop=stop,
        late=late,
        keeper=Keeper(
            stage=stage,
            strategy=strategy,
            replica=replica,
            clock=tally.clock,
            meet=lambda: _barrier(stage),
            tell=tally.mark,
        ),
        tally=tally,
    )


def _compute_seconds(stage: Stage) -> float:
    """Return what one worker's own computing takes in one step, on a throwaway replica."""
    alone = stage.replica("m", num_steps=1, timer=Untimed(), is_grouped=False)
    return fault_injection.measure(alone, stage.usual_batch())


def _stop_of(stage: Stage, clock: Clock, should_stop: Callable[[], bool]) -> Stop:
    return Stop(
        stage.folder,
        stage.name("t"),
        synchronous=stage.plan.synchronous,
        num_ahead=clock.num_ahead + stage.plan.num_ahead,
        wanted=should_stop,
    )


def _barrier(stage: Stage) -> None:
    # barrier: takes part: every rank of the plan, which is one or all
    if stage.plan.num_ranks == 1 or stage.joining is not None:
        return
    device_ids = [stage.device.index] if stage.state.backend == "nccl" else None
    dist.barrier(device_ids=device_ids)


def _train(course: _Course) -> None:
    # train
    tally, stage = course.tally, course.stage
    tally.start()
    course.late.begin()
    for step, (share, pair) in enumerate(course.source.pairs()):
        if course.stop.before(step):
            tally.was_stopped = True
            break
        stage.lifeline.check(is_waiting=False)  # who seldom waits, or never, ends with the others
        batch = stage.batch(share, pair)
        if course.late.is_kill_due:
            tally.add(tally.clock.stop())  # steps that a GPU has yet to finish
            course.late.kill()
        course.late.begin_step()
        report = course.strategy.step(batch)
        course.late.delay()  # here where the strategy computes in a way of its own
        tally.add(tally.clock.lap(report))
        course.keeper.after(share)
    tally.add(tally.clock.stop())
