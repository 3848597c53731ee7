"""What do all phases of one run share?  (Every rank.)"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ddpnb.protocol import faults
from ddpnb.protocol.messages import RankState, RejoinInfo, RunSpec
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.random_state import seed_everything
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Batch, Plan, Replica, State, Strategy, no_delay
from ddpnb.rank.strategies.timer import Timer
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import DatasetSamples, OptimizerFactory, Pair, Task
from ddpnb.rank.tasks.batches import BatchSchedule, Shard
from ddpnb.rank.training.checkpoint import Place, read
from ddpnb.rank.training.loader import NUM_AHEAD, InlineLoader, PrefetchingLoader, Source
from ddpnb.rank.training.optimizer_hooks import tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run on one rank: its task, its place, and who takes part."""

    spec: RunSpec
    state: RankState
    plan: Plan
    task: Task
    order: BatchSchedule
    folder: Path
    cancellation: CancellationToken
    """Ends the run on this rank where the group is cut."""
    namespace: Mapping[str, object]
    """Where a strategy of the user's own is looked up."""
    first_step: int = 0
    """Global batches that the run to resume was trained on."""
    saved: State | None = None
    """What this rank goes on from."""
    rejoin_info: RejoinInfo | None = None
    """Where this rank comes in, if the others train already."""

    def strategy(self) -> Strategy:
        """Make the strategy anew."""
        return make_strategy(self.spec.strategy, self.namespace)

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return torch.device(self.state.device)

    @property
    def num_steps(self) -> int:
        """Global batches that are left to train on."""
        return self.order.num_steps - self.first_step

    @property
    def workers(self) -> range:
        """The workers that this process holds."""
        plan, rank = self.plan, self.state.rank
        return range(plan.num_workers) if plan.num_ranks == 1 else range(rank, rank + 1)

    def name(self, phase: str) -> str:
        """Return what no other phase and no other run is called."""
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
        """Build the model anew from the seed: the same weights in every phase, on every rank.

        Args:
            phase: what it is for.
            num_steps: global batches that it will see.
            first_step: global batches that its weights will have been trained on.
            timer: is told of what a step is at.
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
        factory = tuned(self.task.optimizer, self.spec, self.plan, self.order)
        return Replica(
            model=model,
            loss=self.task.loss,
            optimizer=_remembering(factory, optimizers),
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
            num_prefetched=NUM_AHEAD * self.spec.num_data_workers if self.fetches_ahead else 0,
            cancellation=self.cancellation,
        )

    def source(self, strategy: Strategy) -> Source:
        """Return where the samples of a strategy that is set up come from."""
        if not self.fetches_ahead:
            return self.direct(strategy)
        assert isinstance(self.task.train, DatasetSamples)
        begun = self.first_step * self.state.world_size + self.state.rank  # other on each rank
        return PrefetchingLoader(
            self.task.train.dataset,
            strategy.shards(),
            self.indices,
            self.spec.num_data_workers,
            seed=(self.spec.seed * 1_000_003 + begun) % 2**63,
        )

    def direct(self, strategy: Strategy) -> Source:
        """Return a source that fetches each share when it is asked for."""
        return InlineLoader(self.task.train, strategy.shards(), self.indices)

    def indices(self, shard: Shard) -> torch.Tensor:
        """Return which samples a share of this run holds."""
        return self.order.indices(self._within_training(shard))

    def batch(self, shard: Shard, pair: Pair) -> Batch:
        """Send the samples of a share to the device."""
        on_gpu = self.device.type == "cuda"
        # Only from pinned memory does a copy to a GPU not make this thread wait.
        inputs, targets = (part.pin_memory() if on_gpu else part for part in pair)
        num_global = self.order.size(self._within_training(shard).step)
        return Batch(
            inputs=inputs.to(self.device, non_blocking=True),
            targets=targets.to(self.device, non_blocking=True),
            num_samples=len(inputs),
            num_global=num_global,
            most_parts=num_global // shard.num_parts if self.syncs_batchnorm else None,
        )

    def smallest_batch(self, strategy: Strategy) -> Batch:
        """Fetch as few samples as the model will be called with: it may stumble over them."""
        plan, order = self.plan, self.order
        sizes = (order.size(0), order.size(order.smallest_shard(1).step))
        num = min(strategy.fewest_samples(size, plan, self.spec.accumulate) for size in sizes)
        if self.syncs_batchnorm:
            num = max(num, 2)  # there the other ranks' samples count, too
        indices = order.indices(Shard(step=0, part=0, num_parts=1))
        return self._alone(*self.task.train.fetch(indices[:num]))

    def usual_batch(self) -> Batch:
        """Fetch one worker's share of a whole global batch."""
        shard = Shard(step=0, part=0, num_parts=self.plan.num_workers)
        return self._alone(*self.task.train.fetch(self.order.indices(shard)))

    def place(self, run_id: str) -> Place:
        """Return this rank's place in the checkpoints of a run."""
        return place(self.spec, self.state, self.plan, run_id)

    @property
    def fetches_ahead(self) -> bool:
        """Whether processes fetch the samples."""
        return self.spec.num_data_workers > 0 and isinstance(self.task.train, DatasetSamples)

    @property
    def syncs_batchnorm(self) -> bool:
        """Whether BatchNorm takes its statistics over all ranks."""
        plan, on_gpu = self.plan, self.device.type == "cuda"
        is_shared = plan.num_ranks == self.state.world_size > 1
        is_in_step = plan.synchronous and plan.num_steps_ahead == 0  # the others must not become so
        return self.spec.sync_batchnorm and is_shared and is_in_step and on_gpu

    def _within_training(self, shard: Shard) -> Shard:
        """Return a share of this run as one of the whole training, of which it may be the end."""
        return Shard(step=self.first_step + shard.step, part=shard.part, num_parts=shard.num_parts)

    def _alone(self, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
        num = len(inputs)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        return Batch(inputs=inputs, targets=targets, num_samples=num, num_global=num)


def build(
    spec: RunSpec,
    state: RankState,
    namespace: Mapping[str, object],
    *,
    folder: Path = Path(),
    cancellation: CancellationToken | None = None,
    filename: str,
) -> RunContext:
    """Load the task and find out who takes part.

    Raises:
        UserError: something cannot be trained.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    faults.check_ranks(spec.slow, spec.kill, state.world_size)
    seed_everything(spec.seed)  # the data, too, come out the same on every rank
    task = load_task(spec, namespace, filename)
    order = BatchSchedule(
        len(task.train),
        batch_size=spec.batch_size,
        num_epochs=spec.num_epochs,
        num_ranks=state.world_size,
        seed=spec.seed,
    )
    known = ChainMap(dict(task.defined), dict(namespace))
    plan = make_strategy(spec.strategy, known).plan(state)
    saved = None
    if spec.resume and state.rank < plan.num_ranks:
        saved = read(place(spec, state, plan, spec.resume), spec)
        order.check_begun(saved["step"])
    return RunContext(
        spec=spec,
        state=state,
        plan=plan,
        task=task,
        order=order,
        folder=folder,
        cancellation=cancellation or CancellationToken(),
        namespace=known,
        first_step=saved["step"] if saved else 0,
        saved=saved,
    )


def place(spec: RunSpec, state: RankState, plan: Plan, run_id: str) -> Place:
    """Return a rank's place in the checkpoints of a run; of asynchronous ones, rank 0's."""
    part, num_parts = (state.rank, plan.num_ranks) if plan.synchronous else (0, 1)
    return Place(folder=Path(spec.checkpoints) / run_id, part=part, num_parts=num_parts)


def _remembering(factory: OptimizerFactory, made: list[torch.optim.Optimizer]) -> OptimizerFactory:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(factory(parameters))
        return made[-1]

    return make
