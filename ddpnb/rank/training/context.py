"""What all phases of one run share (ranks)."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ddpnb.protocol import faults
from ddpnb.protocol.messages import RankState, RejoinInfo, RunSpec
from ddpnb.rank.comm.rendezvous import CancellationToken
from ddpnb.rank.random_state import seed_everything
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Batch, Plan, Replica, State, Strategy, no_delay
from ddpnb.rank.strategies.timer import Timer
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import DatasetSamples, OptimizerFactory, Pair, Task
from ddpnb.rank.tasks.batches import BatchSchedule, Shard
from ddpnb.rank.training.checkpoint import CheckpointPart, read_checkpoint
from ddpnb.rank.training.loader import NUM_PREFETCHED, InlineLoader, PrefetchingLoader, Source
from ddpnb.rank.training.optimizer_hooks import with_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run on one rank: its task, its batches, and which ranks take part."""

    spec: RunSpec
    state: RankState
    plan: Plan
    task: Task
    schedule: BatchSchedule
    folder: Path
    cancellation: CancellationToken
    """Ends the run on this rank when the group is aborted."""
    namespace: Mapping[str, object]
    """Where a strategy of the user's own is looked up."""
    first_step: int = 0
    """Global batches that the resumed run was trained on."""
    checkpoint: State | None = None
    """The state that this rank resumes from."""
    rejoin_info: RejoinInfo | None = None
    """Where this rank joins, if the others train already."""

    def strategy(self) -> Strategy:
        """Return a new instance of the strategy."""
        return make_strategy(self.spec.strategy, self.namespace)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device(self.state.device)

    @property
    def num_steps(self) -> int:
        """Global batches that are left to train on."""
        return self.schedule.num_steps - self.first_step

    @property
    def workers(self) -> range:
        """The workers in this process."""
        plan, rank = self.plan, self.state.rank
        return range(plan.num_workers) if plan.num_ranks == 1 else range(rank, rank + 1)

    def name(self, phase: str) -> str:
        """Return a name that no other phase and no other run has."""
        return f"{self.spec.run_id}-{phase}"

    def replica(
        self,
        phase: str,
        *,
        num_steps: int,
        first_step: int = 0,
        timer: Timer,
        is_grouped: bool = True,
        delay: Callable[[], None] = no_delay,
    ) -> Replica:
        """Build a model from the seed: the same weights in every phase, on every rank.

        Args:
            phase: what the replica is for.
            num_steps: global batches that it will be trained on.
            first_step: global batches that its weights were trained on before.
            timer: measures the parts of its steps.
            is_grouped: whether all ranks that take part use it together.
            delay: makes its steps take longer.
        """
        seed_everything(self.spec.seed)
        model = self.task.model()
        if is_grouped and self.syncs_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = model.to(self.device).train()
        seed_everything(self.spec.seed + 1 + self.state.rank)  # dropout differs between ranks
        optimizers: list[torch.optim.Optimizer] = []
        factory = with_hooks(self.task.optimizer, self.spec, self.plan, self.schedule)
        return Replica(
            model=model,
            loss=self.task.loss,
            optimizer=_recording(factory, optimizers),
            device=self.device,
            rank=self.state.rank,
            world_size=self.state.world_size,
            num_steps=num_steps,
            first_step=first_step,
            folder=self.folder,
            name=self.name(phase),
            timer=timer,
            accumulate=self.spec.accumulate,
            amp=torch.bfloat16 if self.spec.amp == "bf16" else None,
            transport=self.spec.transport,
            optimizers=optimizers,
            delay=delay,
            joins=self.rejoin_info is not None,
            num_prefetched=NUM_PREFETCHED * self.spec.num_data_workers if self.prefetches else 0,
            cancellation=self.cancellation,
        )

    def source(self, strategy: Strategy) -> Source:
        """Return the source of the samples for a strategy that has been set up."""
        if not self.prefetches:
            return self.inline_source(strategy)
        assert isinstance(self.task.train, DatasetSamples)
        offset = self.first_step * self.state.world_size + self.state.rank  # differs between ranks
        return PrefetchingLoader(
            self.task.train.dataset,
            strategy.shards(),
            self.indices,
            self.spec.num_data_workers,
            seed=(self.spec.seed * 1_000_003 + offset) % 2**63,
        )

    def inline_source(self, strategy: Strategy) -> Source:
        """Return a source that fetches each shard only when it is needed."""
        return InlineLoader(self.task.train, strategy.shards(), self.indices)

    def indices(self, shard: Shard) -> torch.Tensor:
        """Return which samples a shard of this run holds."""
        return self.schedule.indices(self._within_training(shard))

    def batch(self, shard: Shard, pair: Pair) -> Batch:
        """Copy the samples of a shard to the device."""
        on_gpu = self.device.type == "cuda"
        # A copy to a GPU makes this thread wait unless it comes from pinned memory.
        inputs, targets = (part.pin_memory() if on_gpu else part for part in pair)
        num_global = self.schedule.size(self._within_training(shard).step)
        return Batch(
            inputs=inputs.to(self.device, non_blocking=True),
            targets=targets.to(self.device, non_blocking=True),
            num_samples=len(inputs),
            num_global=num_global,
            most_parts=num_global // shard.num_parts if self.syncs_batchnorm else None,
        )

    def smallest_batch(self, strategy: Strategy) -> Batch:
        """Fetch as few samples as the model will ever be called with, which may be too few."""
        plan, schedule = self.plan, self.schedule
        sizes = (schedule.size(0), schedule.size(schedule.smallest_shard(1).step))
        num = min(strategy.fewest_samples(size, plan, self.spec.accumulate) for size in sizes)
        if self.syncs_batchnorm:
            num = max(num, 2)  # the statistics include the other ranks' samples
        indices = schedule.indices(Shard(step=0, part=0, num_parts=1))
        return self._alone(*self.task.train.fetch(indices[:num]))

    def usual_batch(self) -> Batch:
        """Fetch one worker's shard of a whole global batch."""
        shard = Shard(step=0, part=0, num_parts=self.plan.num_workers)
        return self._alone(*self.task.train.fetch(self.schedule.indices(shard)))

    def checkpoint_part(self, run_id: str) -> CheckpointPart:
        """Return this rank's part of a run's checkpoints."""
        return checkpoint_part(self.spec, self.state, self.plan, run_id)

    @property
    def prefetches(self) -> bool:
        """Whether other processes fetch the samples."""
        return self.spec.num_data_workers > 0 and isinstance(self.task.train, DatasetSamples)

    @property
    def syncs_batchnorm(self) -> bool:
        """Whether BatchNorm computes its statistics over all ranks."""
        plan, on_gpu = self.plan, self.device.type == "cuda"
        is_shared = plan.num_ranks == self.state.world_size > 1
        is_in_step = (
            plan.synchronous and plan.num_steps_ahead == 0
        )  # else BatchNorm would make it so
        return self.spec.sync_batchnorm and is_shared and is_in_step and on_gpu

    def _within_training(self, shard: Shard) -> Shard:
        """Return a shard of this run as a shard of the whole training, which began earlier."""
        return Shard(step=self.first_step + shard.step, part=shard.part, num_parts=shard.num_parts)

    def _alone(self, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
        num = len(inputs)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        return Batch(inputs=inputs, targets=targets, num_samples=num, num_global=num)


def build_context(
    spec: RunSpec,
    state: RankState,
    namespace: Mapping[str, object],
    *,
    folder: Path = Path(),
    cancellation: CancellationToken | None = None,
    filename: str,
) -> RunContext:
    """Load the task and find out which ranks take part.

    Raises:
        UserError: something cannot be trained.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    faults.check_ranks(spec.slow, spec.kill, state.world_size)
    seed_everything(spec.seed)  # so that the data are the same on every rank
    task = load_task(spec, namespace, filename)
    schedule = BatchSchedule(
        len(task.train),
        batch_size=spec.batch_size,
        num_epochs=spec.num_epochs,
        num_ranks=state.world_size,
        seed=spec.seed,
    )
    known = ChainMap(dict(task.defined), dict(namespace))
    plan = make_strategy(spec.strategy, known).plan(state)
    checkpoint = None
    if spec.resume and state.rank < plan.num_ranks:
        checkpoint = read_checkpoint(checkpoint_part(spec, state, plan, spec.resume), spec)
        schedule.check_unfinished(checkpoint["step"])
    return RunContext(
        spec=spec,
        state=state,
        plan=plan,
        task=task,
        schedule=schedule,
        folder=folder,
        cancellation=cancellation or CancellationToken(),
        namespace=known,
        first_step=checkpoint["step"] if checkpoint else 0,
        checkpoint=checkpoint,
    )


def checkpoint_part(spec: RunSpec, state: RankState, plan: Plan, run_id: str) -> CheckpointPart:
    """Return a rank's part of a run's checkpoints; asynchronous runs have rank 0's part only."""
    part, num_parts = (state.rank, plan.num_ranks) if plan.synchronous else (0, 1)
    return CheckpointPart(folder=Path(spec.checkpoints) / run_id, part=part, num_parts=num_parts)


def _recording(factory: OptimizerFactory, made: list[torch.optim.Optimizer]) -> OptimizerFactory:
    """Return a factory that appends each optimizer that it makes to a list."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(factory(parameters))
        return made[-1]

    return make
