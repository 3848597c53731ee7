"""What all phases of one run share: its workers, their optimizers and its samples (ranks)."""

import contextlib
import itertools
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddpnb.compat.torch_internals import end_data_workers
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState, RejoinInfo, RunSpec
from ddpnb.protocol.notation import check_fault_ranks, parse_strategy
from ddpnb.protocol.processes import die_with_parent
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.link import NO_LINK, Link
from ddpnb.rank.meter import Meter, NullTimer, Timer
from ddpnb.rank.random_state import random_state, seed_everything, set_random_state
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.strategies.worker import Batch, Worker, no_delay
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, Tree, moved
from ddpnb.rank.tasks.samples import DataCache, DatasetSamples, Items
from ddpnb.rank.training.optimizer_hooks import with_hooks

NUM_PREFETCHED = 2
"""Shards that each process fetches or has ready while this worker trains on one."""

NUM_FEW = 8
"""Samples that a loss is looked at with, before anything trains."""

CHECK = "check"
"""The phase in which a training is checked, before anything trains."""

Content = Tree | Items
"""Samples of a shard: one batch, or items where its parts are collated one by one."""

Source = AbstractContextManager[Iterator[tuple[Shard, Content]]]
"""Yields the shards to train on, in order, each with its samples."""


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
    rejoin_info: RejoinInfo | None = None
    """Where this rank joins, if the others train already."""
    link: Link = NO_LINK
    """An emulated network between the ranks."""

    def strategy(self) -> Strategy:
        """Return a new instance of the strategy."""
        return make_strategy(self.spec.strategy, self.namespace)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device(self.state.device)

    @property
    def num_steps(self) -> int:
        """Global batches to train on."""
        return self.schedule.num_steps

    @property
    def steps_between_evaluations(self) -> int:
        """Global batches from one held-out evaluation to the next; 0: only the trained model's."""
        every = 0.0 if self.spec.is_ceiling else self.spec.eval_every
        if every is None:
            num = self.spec.num_points
            return max(1, round(self.num_steps / num)) if num > 1 else 0
        return max(1, round(every * self.schedule.steps_per_epoch)) if every else 0

    @property
    def workers(self) -> range:
        """The workers in this process."""
        plan, rank = self.plan, self.state.rank
        return range(plan.num_workers) if plan.num_ranks == 1 else range(rank, rank + 1)

    def name(self, phase: str) -> str:
        """Return a name that no other phase and no other run has."""
        return f"{self.spec.run_id}-{phase}"

    def worker(
        self,
        phase: str,
        *,
        num_steps: int,
        timer: Timer | None = None,
        is_grouped: bool = True,
        delay: Callable[[], None] = no_delay,
    ) -> Worker:
        """Build a model from the seed: the same weights in every phase, on every rank.

        Args:
            phase: what the worker is for.
            num_steps: global batches that it will be trained on.
            timer: measures its steps; None: nothing does.
            is_grouped: whether all ranks that take part use it together.
            delay: makes its steps take longer.
        """
        model = self.make_model()
        if is_grouped and self.syncs_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model.train()
        seed_everything(self.spec.seed + 1 + self.state.rank)  # dropout differs between ranks
        is_tried = phase == CHECK
        make = with_hooks(self.task.optimizer, self.spec, self.plan, self.schedule, is_tried)
        return Worker(
            model=model,
            make_model=self.make_model,
            training_step=self.task.step,
            make_optimizer=lambda parameters: make(parameters, model, self.make_model),
            device=self.device,
            rank=self.state.rank,
            world_size=self.state.world_size,
            num_steps=num_steps,
            seed=self.spec.seed,
            folder=self.folder,
            name=self.name(phase),
            meter=Meter(timer or NullTimer()),
            accumulate=self.spec.accumulate,
            amp=torch.bfloat16 if self.spec.amp == "bf16" else None,
            link=self.link,
            delay=delay,
            joins=self.rejoin_info is not None,
            num_prefetched=NUM_PREFETCHED * self.num_data_workers if self.prefetches else 0,
            cancellation=self.cancellation,
        )

    def make_model(self) -> nn.Module:
        """Make the model of the run's seed; global random numbers stay as they are."""
        numbers = random_state(self.device)
        try:
            seed_everything(self.spec.seed)
            return self.task.model().to(self.device)
        finally:
            set_random_state(numbers)

    def source(self, strategy: Strategy) -> Source:
        """Return the source of the samples for a strategy that has been set up."""
        if not self.prefetches:
            return nullcontext(self.fetched(strategy))
        assert isinstance(self.task.train, DatasetSamples)
        return prefetching(
            self.task.train,
            strategy.shards(),
            self.indices,
            self.num_data_workers,
            keeps_items=self.keeps_items,
            seed=(self.spec.seed * 1_000_003 + self.state.rank) % 2**63,
        )

    def fetched(self, strategy: Strategy) -> Iterator[tuple[Shard, Content]]:
        """Fetch the samples of each of a strategy's shards when it is its turn."""
        for shard in strategy.shards():
            yield shard, self.fetch(shard)

    def fetch(self, shard: Shard) -> Content:
        """Fetch the samples of a shard."""
        return self._fetch(self.indices(shard))

    def indices(self, shard: Shard) -> Tensor:
        """Return which samples a shard holds."""
        return self.schedule.indices(shard)

    def batch(self, shard: Shard, content: Content) -> Batch:
        """Copy the samples of a shard to the device."""
        num_global = self.schedule.size(shard.step)
        least, num_larger = divmod(num_global, shard.num_parts)
        return Batch(
            content=content if isinstance(content, Items) else moved(content, self.device),
            device=self.device,
            num_samples=least + (shard.part < num_larger),
            num_global=num_global,
            most_parts=num_global // shard.num_parts if self.syncs_batchnorm else None,
        )

    def smallest_batch(self) -> Batch:
        """Fetch as few samples as the model will ever be called with, which may be too few."""
        schedule = self.schedule
        sizes = (schedule.size(0), schedule.size(schedule.smallest_shard(1).step))
        num = min(map(self._fewest_samples, sizes))
        if self.syncs_batchnorm:
            num = max(num, 2)  # the statistics include the other ranks' samples
        return self._alone(schedule.indices(Shard(step=0, part=0, num_parts=1))[:num])

    def _fewest_samples(self, num_samples: int) -> int:
        """Return the fewest samples of a global batch that the model is called with at once."""
        plan, accumulate = self.plan, self.spec.accumulate
        if plan.num_ranks == 1:  # dp splits each micro-batch among the replicas
            num_parts = min(accumulate, num_samples)
            micro_batches = (num_samples // num_parts, -(-num_samples // num_parts))
            return min(_fewest_of(size, plan.num_workers) for size in micro_batches)
        shard_size = num_samples // plan.num_workers
        return shard_size // min(accumulate, shard_size)

    def few_samples(self) -> Batch:
        """Fetch a few samples, as one batch that can be split."""
        indices = self.schedule.indices(Shard(step=0, part=0, num_parts=1))[:NUM_FEW]
        batch, train = self._alone(indices), self.task.train
        if isinstance(train, DatasetSamples) and train.has_own_collate:
            return replace(batch, content=train.fetch_items(indices))
        return batch

    def own_batch(self) -> Batch:
        """Fetch this rank's shard of the smallest global batch, with its weight in a real run."""
        num = self.state.world_size
        shard = Shard(
            step=self.schedule.smallest_shard(num).step, part=self.state.rank, num_parts=num
        )
        alone = self._alone(self.schedule.indices(shard))
        return replace(alone, num_global=self.schedule.size(shard.step))

    def usual_batch(self) -> Batch:
        """Fetch one worker's shard of a whole global batch."""
        shard = Shard(step=0, part=0, num_parts=self.plan.num_workers)
        return self._alone(self.schedule.indices(shard))

    @property
    def prefetches(self) -> bool:
        """Whether other processes fetch the samples."""
        return self.num_data_workers > 0 and isinstance(self.task.train, DatasetSamples)

    @property
    def num_data_workers(self) -> int:
        """How many processes fetch: as many as asked for, or as the user's DataLoader has."""
        return self.spec.num_data_workers or getattr(self.task.train, "num_workers", 0)

    @property
    def keeps_items(self) -> bool:
        """Whether a batch is split before it is collated: what the cell collates has no rows."""
        train = self.task.train
        is_split = self.spec.accumulate > 1 or self.plan.num_workers > self.plan.num_ranks
        return is_split and isinstance(train, DatasetSamples) and train.has_own_collate

    @property
    def is_own(self) -> bool:
        """Whether the strategy is a class of the user's own: it need not use the cell's loss."""
        return parse_strategy(self.spec.strategy).name not in STRATEGIES

    @property
    def is_evaluated(self) -> bool:
        """Whether the model must have a score in the end; a class of one's own may have no loss."""
        return self.task.has_loss or self.task.has_measures or not self.is_own

    @property
    def has_loss(self) -> bool:
        """Whether the trained model is scored by the loss too."""
        if self.spec.skips_loss:
            return False
        return self.task.has_loss or not (self.is_own and self.task.has_measures)

    @property
    def syncs_batchnorm(self) -> bool:
        """Whether BatchNorm computes its statistics over all ranks."""
        plan, on_gpu = self.plan, self.device.type == "cuda"
        is_shared = plan.num_ranks == self.state.world_size > 1
        # Ranks that do not wait for each other in each step would do so in BatchNorm.
        is_in_step = plan.synchronous and plan.num_steps_ahead == 0 and not plan.never_waits
        return self.spec.sync_batchnorm and is_shared and is_in_step and on_gpu

    def _alone(self, indices: Tensor) -> Batch:
        num, content = len(indices), self._fetch(indices)
        content = content if isinstance(content, Items) else moved(content, self.device)
        return Batch(content=content, device=self.device, num_samples=num, num_global=num)

    def _fetch(self, indices: Tensor) -> Content:
        train = self.task.train
        if self.keeps_items and isinstance(train, DatasetSamples):
            return train.fetch_items(indices)
        return train.fetch(indices)


def build_context(
    spec: RunSpec,
    state: RankState,
    namespace: Mapping[str, object],
    *,
    folder: Path = Path(),
    cancellation: CancellationToken | None = None,
    filename: str,
    rejoin_info: RejoinInfo | None = None,
    cache: DataCache | None = None,
) -> RunContext:
    """Load the task and find out which ranks take part.

    Raises:
        UserError: something cannot be trained.
        Exception: whatever the cell itself raises, with its own traceback.
    """
    check_fault_ranks(spec.slow, spec.kill, state.world_size)
    if spec.link:
        emulated_link.check(state.device)
    # so that the data are the same on every rank, and in every repeat
    seed_everything(spec.seed if spec.data_seed is None else spec.data_seed)
    task = load_task(spec, namespace, filename, cache)
    known = ChainMap(dict(task.defined), dict(namespace))
    plan = make_strategy(spec.strategy, known).plan(state)
    schedule = BatchSchedule(
        task.train.num_per_epoch,
        batch_size=_global_batch(spec, plan, task.train.num_per_epoch),
        num_epochs=spec.num_epochs,
        num_ranks=state.world_size if spec.batch_per_worker is None else plan.num_workers,
        seed=spec.seed,
        draw=task.train.draw,
    )
    return RunContext(
        spec=spec,
        state=state,
        plan=plan,
        task=task,
        schedule=schedule,
        folder=folder,
        cancellation=cancellation or CancellationToken(),
        namespace=known,
        rejoin_info=rejoin_info,
    )


def _global_batch(spec: RunSpec, plan: Plan, num_samples: int) -> int:
    """Return the size of a global batch.

    Raises:
        UserError: ``--batch-per-worker`` makes it larger than the training split.
    """
    size = spec.global_batch(plan.num_workers)
    if spec.batch_per_worker is not None and size > num_samples:
        raise UserError(
            f"--batch-per-worker {spec.batch_per_worker} makes a global batch of {size} with "
            f"{plan.num_workers} workers, larger than the training split ({num_samples} samples); "
            f"give {max(1, num_samples // plan.num_workers)} or less."
        )
    return size


@contextlib.contextmanager
def linked(context: RunContext) -> Iterator[RunContext]:
    """Yield the context of a run in which exchanges last as over its link, if it has one."""
    path = context.folder / f"{context.name('l')}.link"
    world_size, token = context.state.world_size, context.cancellation
    with emulated_link.opened(context.spec.link, path, world_size, token) as link:
        yield replace(context, link=link)


@contextlib.contextmanager
def prefetching(
    samples: DatasetSamples,
    shards: Iterable[Shard],
    indices: Callable[[Shard], Tensor],
    num_processes: int,
    *,
    seed: int,
    keeps_items: bool = False,
) -> Iterator[Iterator[tuple[Shard, Content]]]:
    """Fetch shards in other processes before they are needed, by torch's ``DataLoader``.

    The processes live as long as the context.  They fetch nothing before the first shard is asked
    for, so that no strategy has samples ready when the clock starts.

    Args:
        samples: those to fetch.
        shards: all that will be trained on, in order; taken early, ``NUM_PREFETCHED`` for each
            process, also from a queue that others take from.
        indices: returns the sample numbers of a shard.
        num_processes: how many processes fetch.
        seed: of the random numbers in these processes.
        keeps_items: whether items come as they are, to be collated later.
    """
    taken: deque[Shard] = deque()
    num_first = NUM_PREFETCHED * num_processes  # what the loader takes at once

    def numbers() -> Iterator[list[int]]:
        yield from ([] for _ in range(num_first))
        for shard in shards:
            taken.append(shard)
            yield indices(shard).tolist()

    batches = iter(
        DataLoader(
            _Startable(samples.dataset),
            batch_sampler=numbers(),
            collate_fn=partial(_collated, list if keeps_items else samples.collate),
            num_workers=num_processes,
            prefetch_factor=NUM_PREFETCHED,
            worker_init_fn=_end_with_rank,
            # Other start methods pickle the data set, and a class from a cell cannot be.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator().manual_seed(seed),  # leaves the global state alone
        )
    )
    try:
        real = itertools.islice(batches, num_first, None)
        if keeps_items:
            yield ((taken.popleft(), Items(items, samples.collate)) for items in real)
        else:
            yield ((taken.popleft(), batch) for batch in real)
    finally:  # at once, for an exception's traceback may keep the iterator alive
        end_data_workers(batches)


@final
class _Startable(Dataset[Any]):
    """A data set that a process can be asked for no sample of, so that it only starts."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if not numbers:
            return []
        if callable(get := getattr(self._dataset, "__getitems__", None)):
            return list(get(numbers))
        return [self._dataset[number] for number in numbers]


def _collated(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    return collate(items) if items else None


def _end_with_rank(_: int) -> None:
    die_with_parent()


def _fewest_of(num_samples: int, num_replicas: int) -> int:
    """Return how many samples the last replica that has any gets: 1, where 3 share 7 as 3, 3, 1."""
    most = -(-num_samples // num_replicas)
    return (num_samples - 1) % most + 1
