"""A run on one rank: what is trained, with what, and what came out.  Runs on the ranks."""

import contextlib
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import (
    Evaluating,
    Mark,
    Memory,
    RankState,
    RejoinInfo,
    RunHeader,
    RunReport,
    RunSpec,
    StepEvent,
)
from ddpnb.protocol.notation import parse_kills, parse_ranks, parse_slow, parse_strategy
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.clock import Clock, MeasuredClock
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.emulation import ComputeTimes, Emulation
from ddpnb.rank.emulation.clock import VirtualClock
from ddpnb.rank.random_state import preserve_random, seed_everything
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.tasks import load_task
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, Tree, moved
from ddpnb.rank.tasks.samples import DatasetSamples, prefetching
from ddpnb.rank.training.optimizers import make_optimizer
from ddpnb.rank.worker import Batch, Worker

Publish = Callable[[RunHeader | StepEvent | Mark | Evaluating], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The state, variables and folder of this rank that a run uses."""

    state: RankState
    namespace: Mapping[str, object] = field(default_factory=dict)
    """The user's variables on this rank.  A run does not change the variables."""
    folder: Path = Path()
    """A private directory that all ranks of this host share, for sockets and shared memory."""
    filename: str = "<comparison>"
    """The name of the comparison's cell in tracebacks."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """If the group is aborted, this token ends the run and all waits outside the process group."""
    rejoin_info: RejoinInfo | None = None
    """Set only if this rank joins a run in progress, without a process group; otherwise None."""


@dataclass(kw_only=True)
class TrainingRun:
    """One run on one rank.

    A run makes its workers and batches, publishes its steps as events, and counts its results.
    """

    spec: RunSpec
    here: Surroundings
    """This rank's surroundings.  ``namespace`` also contains the names that the cell defines."""
    plan: Plan
    task: Task
    schedule: BatchSchedule
    publish: Publish = lambda _: None
    clock: Clock = field(default_factory=Clock)
    """Measures the time of steps; ``prepare_clock`` turns it on."""
    late_seconds: float = 0.0
    """Seconds that the other ranks had already trained when this rank joined the run."""
    num_steps: int = 0
    num_bytes_received: int = 0
    was_stopped: bool = False
    memory: Memory = field(default_factory=Memory)
    num_lost_samples: int = 0
    """Number of samples in the shards that workers had taken but not finished when they died."""
    num_items: int = 0
    """Number of items of the data set that this rank has trained on."""
    num_rows: int = 0
    """Number of samples that ``collate_fn`` has made of these items."""
    warnings: tuple[str, ...] = ()

    def strategy(self) -> Strategy:
        """Return a new instance of the strategy."""
        return make_strategy(self.spec.strategy, self.here.namespace)

    @property
    def state(self) -> RankState:
        """The state of this rank: its host, process and device."""
        return self.here.state

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device(self.state.device)

    @property
    def workers(self) -> range:
        """The range with the number of each worker in this process."""
        plan, rank = self.plan, self.state.rank
        return range(plan.num_workers) if plan.num_ranks == 1 else range(rank, rank + 1)

    def name(self, phase: str) -> str:
        """Return a name that is unique to this run and phase."""
        return f"{self.spec.run_id}-{phase}"

    def worker(
        self,
        phase: str,
        *,
        num_steps: int,
        clock: Clock | None = None,
    ) -> Worker:
        """Make a worker.  The model has the same initial weights in every phase and on every rank.

        The worker trains on ``num_steps`` global batches, and ``clock`` measures its steps.
        """
        model = self.make_model()
        model.train()
        seed_everything(self.spec.seed + 1 + self.state.rank)  # dropout differs between ranks
        num_updates = max(1, round(self.schedule.num_steps * self.plan.updates_per_batch))
        worker: Worker = Worker(
            model=model,
            make_model=self.make_model,
            training_step=self.task.step,
            make_optimizer=lambda parameters: make_optimizer(
                parameters, worker, self.task.optimizer, self.spec, num_updates
            ),
            device=self.device,
            rank=self.state.rank,
            world_size=self.state.world_size,
            local_world_size=self.state.local_world_size,
            num_shards=self.plan.num_ranks,
            num_steps=num_steps,
            folder=self.here.folder,
            name=self.name(phase),
            clock=clock or Clock(),
            accumulate=self.spec.accumulate,
            amp=torch.bfloat16 if self.spec.amp == "bf16" else None,
            emulation=self.emulation,
            joins=self.here.rejoin_info is not None,
            num_prefetched=self.num_data_workers * getattr(self.task.train, "num_prefetched", 0),
            cancellation=self.here.cancellation,
        )
        return worker

    @cached_property
    def emulation(self) -> Emulation | None:
        """The emulated devices; None if steps are measured, or if the devices' speed is unknown."""
        emulated = self.spec.emulated
        if emulated is None or emulated.compute is None:
            return None
        schedule = self.schedule
        least = schedule.num_in(schedule.smallest_shard(self.plan.num_workers))
        times = ComputeTimes(
            compute=emulated.compute,
            num_passes=min(self.spec.accumulate, least),
            slow=parse_slow(self.spec.slow),
            jitter=self.spec.jitter,
            seed=self.spec.seed,
        )
        size = num_bytes(each for each in self.make_model().parameters() if each.requires_grad)
        return Emulation(
            devices=emulated, times=times, num_bytes=size, num_in_shard=schedule.num_in
        )

    def barrier(self) -> None:
        """Wait for the other ranks.  Every rank that the strategy uses takes part."""
        if self.plan.num_ranks == 1 or self.here.rejoin_info is not None:
            return
        dist.barrier(device_ids=[self.device.index] if self.state.backend == "nccl" else None)

    def make_model(self) -> nn.Module:
        """Make the model from the run's seed without changing the global random state."""
        with preserve_random(self.device):
            seed_everything(self.spec.seed)
            return self.task.model().to(self.device)

    def source(
        self, shards: Iterable[Shard]
    ) -> contextlib.AbstractContextManager[Iterator[tuple[Shard, Tree]]]:
        """Return a context that provides an iterator over (shard, samples) pairs."""
        train = self.task.train
        if not self.num_data_workers or not isinstance(train, DatasetSamples):
            return contextlib.nullcontext((shard, self._fetch(shard)) for shard in shards)
        return prefetching(
            train,
            ((shard, self.schedule.indices(shard)) for shard in shards),
            self.num_data_workers,
            seed=(self.spec.seed * 1_000_003 + self.state.rank) % 2**63,
        )

    def _fetch(self, shard: Shard) -> Tree:
        return self.task.train.fetch(self.schedule.indices(shard))

    def batch(self, shard: Shard, tree: Tree | None = None) -> Batch:
        """Copy the samples of a shard to the device.  Raise ``UserError`` if there are none.

        ``tree`` has the samples if they have been fetched.
        """
        num_global = self.schedule.size(shard.step)
        batch = Batch(
            tree=moved(self._fetch(shard) if tree is None else tree, self.device),
            num_samples=self.schedule.num_in(shard),
            num_global=num_global,
            max_micro_batches=num_global // shard.num_shards,
        )
        if not batch.num_rows:
            raise UserError(
                f"collate_fn dropped all {batch.num_samples} items of a worker's batch. Return at "
                "least one sample, or use a larger --batch-size."
            )
        return batch

    def usual_batch(self) -> Batch:
        """Fetch a batch that is as large as one worker's shard of a full global batch."""
        return self.first_batch(-(-self.schedule.size(0) // self.plan.num_workers))

    def first_batch(self, num_samples: int, *, start: int = 0, times: int = 1) -> Batch:
        """Fetch samples of the first global batch as one batch, with each sample ``times`` times.

        ``start`` is the number of samples before the batch.
        """
        every = self.schedule.indices(Shard(step=0, index=0, num_shards=1))
        first = every[start : start + num_samples]
        indices = first.repeat(times)
        tree = moved(self.task.train.fetch(indices), self.device)
        return Batch(tree=tree, num_samples=len(indices), num_global=len(indices))

    @property
    def num_data_workers(self) -> int:
        """Number of processes that fetch samples, as set by ``--data-workers`` or a DataLoader."""
        train = self.task.train
        if not isinstance(train, DatasetSamples):  # tensors in memory
            return 0
        return self.spec.num_data_workers or train.num_workers

    @property
    def is_own(self) -> bool:
        """True if the user wrote the strategy.  A user's strategy may ignore the cell's loss."""
        return parse_strategy(self.spec.strategy).name not in STRATEGIES

    @property
    def is_evaluated(self) -> bool:
        """True if the task has a loss or measures, or if the strategy is a built-in strategy."""
        return self.task.has_loss or self.task.has_measures or not self.is_own

    @property
    def has_loss(self) -> bool:
        """True if the score of the trained model includes the loss."""
        return self.task.has_loss or not (self.is_own and self.task.has_measures)

    # -- the results --------------------------------------------------------------------------

    def prepare_clock(self) -> None:
        """Create the clock.  On emulated devices, the clock computes the time of steps."""
        if self.emulation is None:
            self.clock = MeasuredClock(self.device)
            return
        path = self.here.folder / self.name("t")
        check = self.here.cancellation.check
        self.clock = VirtualClock(self.emulation, self.workers, path, check)

    def start(self) -> None:
        """Start counting time."""
        rejoin_info = self.here.rejoin_info
        if rejoin_info is not None and self.emulation is None:
            self.late_seconds = time.time() - rejoin_info.began_at
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.clock.start()

    def add(self, steps: list[StepEvent]) -> None:
        """Count and number finished steps, and publish them as events."""
        rejoin_info = self.here.rejoin_info
        first_step = rejoin_info.first_step if rejoin_info else 0
        for step in steps:
            number, seconds = first_step + self.num_steps, self.late_seconds + step.seconds
            self.publish(replace(step, step=number, seconds=seconds))
            self.num_steps += 1
            self.num_bytes_received += step.num_bytes_received

    def note_memory(self, memory: Memory) -> None:
        """Record ``memory``.  First scale it to an emulated model, or add the GPU's peak."""
        emulation = self.emulation
        if emulation is not None and emulation.devices.model:
            memory = memory.scaled(emulation.scale)
        elif self.device.type == "cuda" and not self.plan.is_emulated:
            memory = memory._replace(peak=torch.cuda.max_memory_allocated(self.device))
        self.memory = memory

    def mark(self, text: str) -> None:
        """Publish a mark for an event that has just happened on this rank."""
        rank = self.state.rank
        self.publish(Mark(rank=rank, seconds=self.late_seconds + self.clock.seconds, text=text))

    def report(self) -> RunReport:
        """Return the report of the run on this rank."""
        collated = (
            f"On rank {self.state.rank}, collate_fn made {self.num_rows:,} samples of "
            f"{self.num_items:,} items. Speeds count items, and scores count samples."
        )
        return RunReport(
            run_id=self.spec.run_id,
            rank=self.state.rank,
            num_steps=self.num_steps,
            num_bytes_received=self.num_bytes_received,
            seconds=self.clock.seconds,
            was_stopped=self.was_stopped,
            memory=self.memory,
            num_lost_samples=self.num_lost_samples,
            notes=(collated,) if self.num_rows != self.num_items else (),
            warnings=self.warnings,
        )


def load_run(spec: RunSpec, here: Surroundings, publish: Publish = lambda _: None) -> TrainingRun:
    """Load the task and find out which ranks take part.

    Raises:
        UserError: if the run's settings or the cell are invalid.
        Exception: any exception that the cell's code raises, with its traceback.
    """
    state = here.state
    named = [*(each.rank for each in parse_slow(spec.slow)), *parse_kills(spec.kill)]
    parse_ranks(",".join(map(str, named)), state.world_size)  # raises if a rank does not exist
    # so that the data are the same on every rank and in every repeat
    seed_everything(spec.data_seed)
    task = load_task(spec, here.namespace, here.filename)
    known = ChainMap(dict(task.defined), dict(here.namespace))
    here = replace(here, namespace=known)
    plan = make_strategy(spec.strategy, known).plan(state)
    schedule = BatchSchedule(
        len(task.train),
        batch_size=spec.global_batch(plan.num_workers),
        num_epochs=spec.num_epochs,
        num_ranks=state.world_size if spec.batch_per_worker is None else plan.num_workers,
        seed=spec.seed,
    )
    return TrainingRun(
        spec=spec, here=here, plan=plan, task=task, schedule=schedule, publish=publish
    )
