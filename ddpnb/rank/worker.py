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
import math
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ddpnb.rank.check import check_training
from ddpnb.rank.clock import Clock, Lap, clock_of
from ddpnb.rank.evaluate import evaluate
from ddpnb.rank.order import Order, Share
from ddpnb.rank.stop import Stop
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Batch, Plan, Replica, Strategy, Timer, Untimed
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.transport.meeting import excused
from ddpnb.rank.transport.message import RunOverError
from ddpnb.rank.tuning import tuned
from ddpnb.rank.untouched import seed_everything, untouched
from ddpnb.wire import Joining, Mark, RankState, RunHeader, RunReport, RunSpec, StepEvent

Publish = Callable[[RunHeader | StepEvent | Mark], None]


def check(spec: RunSpec, *, state: RankState, namespace: Mapping[str, object]) -> None:
    """Refuse what cannot be trained, before anything trains.

    Every rank may call it alone: nothing is sent.

    Args:
        spec: the training to check.
        state: where this rank lives.
        namespace: the user's variables on this rank; left as they are.

    Raises:
        UserError: one sentence that says what is wrong and what to do.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    with untouched(torch.device(state.device)):
        stage = _build(spec, state, namespace)
        check_training(stage.replica("check", num_steps=1, timer=Untimed()), stage.smallest_batch())


def run(
    spec: RunSpec,
    *,
    state: RankState,
    folder: Path,
    publish: Publish,
    namespace: Mapping[str, object],
    should_stop: Callable[[], bool],
    joining: Joining | None = None,
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
        joining: where this rank comes in, if the others train already; it is in no group then.

    Raises:
        UserError: what ``check`` would have refused.
        RuntimeError: another rank left in the middle of the run.
    """
    with untouched(torch.device(state.device)):
        stage = _build(spec, state, namespace, folder)
        if state.rank >= stage.plan.num_ranks:
            return RunReport(run_id=spec.run_id, rank=state.rank, took_part=False)
        if joining is not None:
            return _join(replace(stage, joining=joining), publish, should_stop)
        with _excused(stage, "r"):
            _rehearse(stage)
        with _excused(stage, "t"):
            return _perform(stage, publish, should_stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """All that the phases of one run share."""

    spec: RunSpec
    state: RankState
    plan: Plan
    task: Task
    order: Order
    folder: Path
    namespace: Mapping[str, object]
    """Where a strategy of the user's own is looked up."""
    joining: Joining | None = None

    def strategy(self) -> Strategy:
        return make_strategy(self.spec.strategy, self.namespace)

    @property
    def device(self) -> torch.device:
        return torch.device(self.state.device)

    def name(self, phase: str) -> str:
        return f"{self.spec.run_id}-{phase}"

    def replica(self, phase: str, *, num_steps: int, timer: Timer) -> Replica:
        """Build the model anew from the seed: the same weights in every phase, on every rank."""
        seed_everything(self.spec.seed)
        model = self.task.model().to(self.device).train()
        seed_everything(self.spec.seed + 1 + self.state.rank)  # dropout differs between ranks
        return Replica(
            model=model,
            loss=self.task.loss,
            optimizer=tuned(self.task.optimizer, self.spec, self.plan, self.order),
            device=self.device,
            rank=self.state.rank,
            world_size=self.state.world_size,
            num_steps=num_steps,
            folder=self.folder,
            name=self.name(phase),
            timer=timer,
            accumulate=self.spec.accumulate,
            amp=torch.bfloat16 if self.spec.amp == "bf16" else None,
            transport=self.spec.transport,
            joins=self.joining is not None,
        )

    def fetch(self, share: Share) -> Batch:
        """Fetch the samples of a share and send them to the device."""
        indices = self.order.indices(share)
        pair = self.task.train.fetch(indices)
        on_gpu = self.device.type == "cuda"
        # Only from pinned memory does a copy to a GPU not make this thread wait.
        inputs, targets = (part.pin_memory() if on_gpu else part for part in pair)
        return Batch(
            inputs=inputs.to(self.device, non_blocking=True),
            targets=targets.to(self.device, non_blocking=True),
            num_samples=len(indices),
            num_global=self.order.size(share.step),
        )

    def smallest_batch(self) -> Batch:
        """Fetch the batch that a model is most likely to stumble over."""
        return self.fetch(self.order.smallest_share(self.plan.num_workers))


def _build(
    spec: RunSpec, state: RankState, namespace: Mapping[str, object], folder: Path = Path()
) -> _Stage:
    # build: the data, too, come out the same on every rank, also where they are random
    seed_everything(spec.seed)
    task = load_task(spec, namespace)
    order = Order(
        len(task.train),
        batch_size=spec.batch_size,
        num_epochs=spec.num_epochs,
        num_ranks=state.world_size,
        seed=spec.seed,
    )
    known = ChainMap(dict(task.defined), dict(namespace))
    return _Stage(
        spec=spec,
        state=state,
        plan=make_strategy(spec.strategy, known).plan(state),
        task=task,
        order=order,
        folder=folder,
        namespace=known,
    )


def _join(stage: _Stage, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    # join: nothing that needs the others, who do not wait; there may be none any more
    try:
        return _perform(stage, publish, should_stop)
    except RunOverError:
        return RunReport(run_id=stage.spec.run_id, rank=stage.state.rank, took_part=False)


def _excused(stage: _Stage, phase: str) -> contextlib.AbstractContextManager[None]:
    """Where a phase fails, tell those who would wait for this rank in vain."""
    if stage.plan.synchronous or stage.plan.num_ranks == 1:
        return contextlib.nullcontext()
    return excused(stage.name(phase), stage.state.rank, stage.folder)


def _rehearse(stage: _Stage) -> None:
    # rehearse: with its own replica, optimizer and files, of which nothing is kept
    num_steps = min(stage.spec.num_warmup_steps, stage.order.num_steps)
    if num_steps == 0:
        return
    clock = clock_of(stage.device)
    with contextlib.closing(stage.strategy()) as strategy:
        strategy.setup(stage.replica("r", num_steps=num_steps, timer=clock))
        clock.start()
        for share in strategy.shares():
            clock.lap(strategy.step(stage.fetch(share)))
        clock.stop()
        strategy.finish()


def _perform(stage: _Stage, publish: Publish, should_stop: Callable[[], bool]) -> RunReport:
    tally = _Tally(publish=publish, clock=clock_of(stage.device), joining=stage.joining)
    stop = _stop_of(stage, tally.clock, should_stop)
    with (
        contextlib.closing(stage.strategy()) as strategy,
        contextlib.closing(stop),
    ):
        replica = stage.replica("t", num_steps=stage.order.num_steps, timer=tally.clock)
        num_parameters = sum(parameter.numel() for parameter in replica.model.parameters())
        strategy.setup(replica)
        if stage.state.rank == 0:
            publish(_header(stage, num_parameters))
        _barrier(stage)
        _train(stage, strategy, stop, tally)
        # finish: waits for all; only then may the file go that tells them to stop
        model = strategy.finish()
        lost = sum(len(stage.order.indices(share)) for share in strategy.lost_shares())
    # evaluate
    if stage.state.rank != 0:
        return tally.report(stage)
    verdict = evaluate(model, stage.task, stage.device)
    return tally.report(
        stage,
        final_loss=verdict.train.loss,
        held_out_loss=verdict.held_out.loss,
        held_out_accuracy=verdict.held_out.accuracy,
        num_lost_samples=lost,
    )


def _stop_of(stage: _Stage, clock: Clock, should_stop: Callable[[], bool]) -> Stop:
    return Stop(
        stage.folder,
        stage.name("t"),
        synchronous=stage.plan.synchronous,
        num_ahead=clock.num_ahead,
        wanted=should_stop,
    )


def _barrier(stage: _Stage) -> None:
    # barrier: takes part: every rank of the plan, which is one or all
    if stage.plan.num_ranks == 1 or stage.joining is not None:
        return
    device_ids = [stage.device.index] if stage.state.backend == "nccl" else None
    dist.barrier(device_ids=device_ids)


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Counts steps and samples of this rank, and makes events of them."""

    publish: Publish
    clock: Clock
    num_steps: int = 0
    num_samples: int = 0
    joining: Joining | None = None
    late_seconds: float = 0.0
    """How long the others had trained when this rank began."""

    def start(self) -> None:
        if self.joining is not None:
            self.late_seconds = time.time() - self.joining.began_at
        self.clock.start()

    def add(self, laps: list[Lap]) -> None:
        for lap in laps:
            self.publish(
                StepEvent(
                    step=self.num_steps + (self.joining.first_step if self.joining else 0),
                    seconds=self.late_seconds + lap.seconds,
                    num_samples=lap.report.num_samples,
                    loss=lap.loss,
                    staleness=lap.report.staleness,
                    parts=lap.parts,
                    num_bytes_sent=lap.report.num_bytes_sent,
                )
            )
            self.num_steps += 1
            self.num_samples += lap.report.num_samples

    def report(
        self,
        stage: _Stage,
        final_loss: float = math.nan,
        held_out_loss: float = math.nan,
        held_out_accuracy: float = math.nan,
        num_lost_samples: int = 0,
    ) -> RunReport:
        return RunReport(
            run_id=stage.spec.run_id,
            rank=stage.state.rank,
            took_part=True,
            num_steps=self.num_steps,
            num_samples=self.num_samples,
            seconds=self.clock.seconds,
            final_loss=final_loss,
            held_out_loss=held_out_loss,
            held_out_accuracy=held_out_accuracy,
            num_lost_samples=num_lost_samples,
        )


def _train(stage: _Stage, strategy: Strategy, stop: Stop, tally: _Tally) -> None:
    # train
    tally.start()
    for step, share in enumerate(strategy.shares()):
        if stop.before(step):
            break
        tally.add(tally.clock.lap(strategy.step(stage.fetch(share))))
    tally.add(tally.clock.stop())


def _header(stage: _Stage, num_parameters: int) -> RunHeader:
    shared = stage.state.shares_device and stage.plan.num_ranks > 1
    shared_note = ("Several ranks share one GPU.",) if shared else ()
    return RunHeader(
        run_id=stage.spec.run_id,
        strategy=stage.spec.strategy,
        synchronous=stage.plan.synchronous,
        num_workers=stage.plan.num_workers,
        num_threads=stage.state.num_threads,
        device=stage.state.device,
        backend=stage.state.backend,
        num_parameters=num_parameters,
        num_samples=stage.order.num_samples,
        survives_deaths=stage.plan.survives_deaths and stage.spec.transport in ("auto", "shm"),
        notes=stage.plan.notes + stage.task.notes + shared_note,
    )
