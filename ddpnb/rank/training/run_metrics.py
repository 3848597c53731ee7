"""Counts the steps of a rank in a run, and publishes them.  Runs on the ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.optim import SGD, Optimizer

from ddpnb.protocol.messages import (
    Evaluating,
    Mark,
    Memory,
    RunHeader,
    RunReport,
    RunSpec,
    StepEvent,
)
from ddpnb.protocol.notation import parse_kills, parse_slow
from ddpnb.rank.clock import Clock, MeasuredClock
from ddpnb.rank.laboratory.clock import VirtualClock
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.worker import Worker

_CEILING_NOTE = "This ceiling (upper bound) was trained briefly and timed, but not evaluated."

Publish = Callable[[RunHeader | StepEvent | Mark | Evaluating], None]


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """Counts the steps of this rank, and publishes the steps as events."""

    context: RunContext
    publish: Publish
    clock: Clock = field(init=False)
    """Measures the time of steps.  On emulated devices, this clock computes the time of steps."""
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
    """Reasons why the results may be wrong."""

    def __post_init__(self) -> None:
        context = self.context
        laboratory, workers = context.laboratory, context.workers
        if laboratory is None:
            self.clock = MeasuredClock(context.device)
            return
        path = context.here.folder / context.name("t")
        self.clock = VirtualClock(laboratory, workers, path, context.here.cancellation.check)

    def start(self) -> None:
        """Start counting time."""
        rejoin_info = self.context.here.rejoin_info
        if rejoin_info is not None and self.context.laboratory is None:
            self.late_seconds = time.time() - rejoin_info.began_at
        if self.context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.context.device)
        self.clock.start()

    def add(self, steps: list[StepEvent]) -> None:
        """Count and number finished steps, and publish them as events."""
        rejoin_info = self.context.here.rejoin_info
        first_step = rejoin_info.first_step if rejoin_info else 0
        for step in steps:
            number, seconds = first_step + self.num_steps, self.late_seconds + step.seconds
            self.publish(replace(step, step=number, seconds=seconds))
            self.num_steps += 1
            self.num_bytes_received += step.num_bytes_received

    def note_memory(self, memory: Memory) -> None:
        """Record ``memory``.  First scale it to an emulated model, or add the GPU's peak."""
        context, laboratory = self.context, self.context.laboratory
        if laboratory is not None and laboratory.devices.model:
            memory = memory.scaled(laboratory.scale)
        elif context.device.type == "cuda" and not context.plan.is_emulated:
            memory = memory._replace(peak=torch.cuda.max_memory_allocated(context.device))
        self.memory = memory

    def mark(self, text: str) -> None:
        """Publish a mark for an event that has just happened on this rank."""
        rank = self.context.state.rank
        self.publish(Mark(rank=rank, seconds=self.late_seconds + self.clock.seconds, text=text))

    def report(self) -> RunReport:
        """Return the report of the run on this rank."""
        collated = (
            f"On rank {self.context.state.rank}, collate_fn made {self.num_rows:,} samples of "
            f"{self.num_items:,} items. Speeds count items, and scores count samples."
        )
        return RunReport(
            run_id=self.context.spec.run_id,
            rank=self.context.state.rank,
            num_steps=self.num_steps,
            num_bytes_received=self.num_bytes_received,
            seconds=self.clock.seconds,
            was_stopped=self.was_stopped,
            memory=self.memory,
            num_lost_samples=self.num_lost_samples,
            notes=(collated,) if self.num_rows != self.num_items else (),
            warnings=self.warnings,
        )


def header_of(context: RunContext, worker: Worker) -> RunHeader:
    """Return the header of a run, with its ranks, devices, data and notes."""
    plan, is_emulated = context.plan, context.spec.is_emulated
    of_plan = () if is_emulated else plan.notes
    own_notes = (*of_plan, *worker.notes, *context.task.notes, *context.spec.notes)
    return RunHeader(
        synchronous=plan.synchronous,
        num_workers=plan.num_workers,
        num_ranks=plan.num_ranks,
        num_threads=torch.get_num_threads(),
        device=context.state.device,
        backend=context.state.backend,
        num_parameters=sum(each.numel() for each in worker.model.parameters()),
        momentum=max(map(_momentum, worker.optimizers), default=0.0),
        num_samples=context.schedule.num_samples,
        num_devices=_num_devices(context),
        sees_exposed=plan.sees_exposed,
        is_emulated=plan.is_emulated and not is_emulated,
        notes=(_CEILING_NOTE,) if context.spec.is_ceiling else own_notes + tuple(_notes(context)),
    )


def _momentum(optimizer: Optimizer) -> float:
    """Return SGD's momentum; return 0 for Nesterov momentum and for all other optimizers."""
    groups = optimizer.param_groups if isinstance(optimizer, SGD) else []
    return max((0.0 if group["nesterov"] else group["momentum"] for group in groups), default=0.0)


def _num_devices(context: RunContext) -> int:
    """Return the number of devices that the workers use: GPUs, or ranks' shares of the CPU."""
    num_workers = context.plan.num_workers
    if context.state.shares_device:
        return max(1, min(num_workers, torch.cuda.device_count()))
    return context.plan.num_devices or num_workers


def _notes(context: RunContext) -> list[str]:
    spec, plan = context.spec, context.plan
    found = _fault_notes(spec, plan)
    if spec.batch_per_worker is not None and plan.num_workers > 1:
        found.append(
            f"Weak scaling: each worker gets {spec.batch_per_worker} samples per step. The global "
            f"batch has {spec.global_batch(plan.num_workers)} samples. The batch of single has "
            f"{spec.batch_per_worker} samples."
        )
    if context.state.shares_device and plan.num_ranks > 1:
        found.append("Several ranks share one GPU.")
    if spec.num_data_workers and not context.num_data_workers:
        found.append("--data-workers has no effect, because the data are tensors in memory.")
    return found


def _fault_notes(spec: RunSpec, plan: Plan) -> list[str]:
    """Return notes that describe the faults injected into a run."""
    faults = [(fault.rank, f"is {fault.text} on purpose") for fault in map(parse_slow, spec.slow)]
    for rank, seconds in parse_kills(spec.kill).items():
        faults.append((rank, f"is killed on purpose after {seconds:g} s of training"))
    found = [
        f"Rank {rank} {what}."
        if rank < plan.num_workers
        else f"Rank {rank} is not used by this strategy, so its fault has no effect."
        for rank, what in faults
    ]
    if spec.jitter:
        found.append(f"On purpose, random delays make steps up to {100 * spec.jitter:g} % longer.")
    return found
