"""The messages between the kernel and the ranks, sent through ipyparallel.  Used in every process.

The messages are frozen, picklable values.  The kernel sends calls and specs; ranks return events
and reports.  Messages to a busy rank are sent through the fork server instead
(``processes.RankCommand`` and ``KernelRequest.SIGNAL``).
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.notation import parse_strategy
from ddpnb.protocol.training_options import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The process and device of one rank."""

    rank: int
    world_size: int
    local_world_size: int
    pid: int
    host: str
    device: str
    """The device in torch's notation, such as ``"cpu"`` or ``"cuda:1"``."""
    device_name: str
    """The name of the GPU; empty for a CPU."""
    num_threads: int
    backend: str
    shares_device: bool = False
    """True if another rank computes on the same GPU."""
    has_peer_access: bool | None = None
    """True if the rank's GPU can read the next GPU's memory; None if there is no next GPU."""
    gpu_software: str = ""
    """The versions of CUDA, NCCL and the GPU's driver; empty for a CPU."""
    missing: tuple[str, ...] = ()
    """A sentence for each feature that is turned off because of a library or the system."""
    can_be_released: bool = True
    """True if ddpnb can end the rank's wait in a collective without killing the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(TrainingSpec):
    """Everything that a rank needs to train a run, or to repeat the run exactly."""

    run_id: str
    strategy: str
    """The strategy and its options, in the user's notation: ``"ddp"``, ``"ddp:hook=fp16"``."""
    repeat: int = 0
    """The index of this repeat of the strategy, from 0.  All runs of one repeat share a seed."""
    is_ceiling: bool = False
    """True if ddpnb added this run as the ceiling.  Such a run is short and is not evaluated."""
    comparison_id: str = ""
    """The id of the comparison, or empty.  Ranks load the cell's data once for each comparison."""
    models: str = ""
    """The folder for the trained weights of each run.  If empty, ddpnb does not save weights."""
    notes: tuple[str, ...] = ()
    num_points: int = 10
    """The number of points of the held-out curve if the user does not choose one."""

    @property
    def data_seed(self) -> int:
        """The seed of the first repeat.  Every repeat loads the data with this seed."""
        return (self.seed - self.repeat) % 2**63

    @property
    def model_file(self) -> Path | None:
        """The file for the ``state_dict`` of the trained model; None if the model is not saved."""
        return Path(self.models) / f"{self.run_id}.pt" if self.models else None

    @property
    def own_momentum(self) -> float | None:
        """The momentum in the strategy's options, such as ``async:momentum=0.5``, or None."""
        chosen = parse_strategy(self.strategy)
        value = chosen.options.get("momentum") if chosen.name in STRATEGIES else None
        return None if value is None else float(value)

    @property
    def used_momentum(self) -> float:
        """The momentum of the default optimizer: ``own_momentum`` if given, else ``momentum``."""
        return self.momentum if self.own_momentum is None else self.own_momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The facts about a run that its first rank sends before the first step."""

    synchronous: bool
    """True if all workers take each step together; otherwise each worker counts its own steps."""
    num_workers: int
    """The number of ranks that train.  For ``dp``, the number of replicas."""
    num_threads: int
    device: str
    backend: str
    num_parameters: int
    num_samples: int
    """The number of training samples that all workers together will see."""
    num_ranks: int = 0
    """The number of ranks that report steps.  0 means the same number as ``num_workers``."""
    num_devices: int = 0
    """The number of GPUs or CPU shares in use.  0 means the same number as ``num_workers``."""
    sees_exposed: bool = True
    """True if ddpnb can distinguish exposed communication from hidden communication."""
    is_emulated: bool = False
    """True if the strategy is emulated, so that the speed is not the real strategy's speed."""
    momentum: float = 0.0
    """The optimizer's momentum if the optimizer is SGD without Nesterov momentum; otherwise 0."""
    notes: tuple[str, ...] = ()
    """Short sentences about emulated, synthetic or adjusted parts, shown with every result."""


class Parts(NamedTuple):
    """Seconds of each part of a step.  The step takes the sum of all parts except ``hidden``."""

    data: float = 0.0
    """Seconds to fetch the batch and to copy the batch to the device."""
    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0
    """Seconds of exposed communication, in which the rank computes nothing."""
    optimizer: float = 0.0
    waiting: float = 0.0
    """Seconds of waiting for other ranks.  If unknown, ``communication`` includes the waiting."""
    hidden: float = 0.0
    """Seconds of communication that overlap with the backward pass and do not lengthen the step."""


class MarkKind(StrEnum):
    """The kind of an event on a rank."""

    KILLED = "killed"
    """A signal killed the rank.  A rank sends this mark itself if a ``--kill`` fault is due.  The
    kernel then kills the rank, as soon as all steps of the rank have arrived."""
    DIED = "died"
    CAME_BACK = "came back"
    OTHER = ""
    """Another event, described by the mark's text."""

    @property
    def is_death(self) -> bool:
        """True if the rank's process ended."""
        return self in (MarkKind.KILLED, MarkKind.DIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event on a rank during a run: an injected fault, a death or a restart."""

    rank: int
    seconds: float
    text: str = ""
    """A description such as ``"3x slower"``; by default the name of the kind."""
    kind: MarkKind = MarkKind.OTHER

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or self.kind.value)


class Evaluating(NamedTuple):
    """Rank 0's progress in evaluating the models of a run after training."""

    num_done: int
    num_all: int
    seconds: float
    """Seconds that the finished evaluations took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step of one worker."""

    step: int = 0
    """The number of the step on this worker: 0, 1, 2 ..."""
    seconds: float = math.nan
    """Training seconds from the run's start to the step's end, without warm-up and evaluation."""
    num_samples: int
    loss: float = math.nan
    """Mean loss over the step's samples, before the update; NaN if unknown."""
    staleness: int | None = None
    """The number of updates that other workers made between this worker's pull and its update."""
    version: int = 0
    """The number of the update that used the gradient: 1, 2, ...; 0 if updates are not counted."""
    parts: Parts = field(default_factory=Parts)
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    """The number of bytes that this worker received.  This number is not part of a step's row."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional numbers of the step, by name.  The step's row does not include these numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a rank's check that a run can be trained."""

    num_samples: int
    """The size of the training split on this rank.  The size should be equal on all ranks."""
    survives_deaths: bool
    """True if the run continues when a rank other than 0 dies."""
    has_accuracy: bool = False
    """True if the model's held-out accuracy can be computed.  Only rank 0 checks this."""
    num_epochs: float = 0.0
    """The number of epochs that take ``min_seconds``.  0 if unknown, or if there is no minimum."""
    num_held_out: int = 0
    seconds_per_judged: float = 0.0
    """Seconds that rank 0 needs to evaluate one held-out sample; 0 if unknown."""
    seconds_per_trained: float = 0.0
    """Seconds per sample that a worker's forward and backward pass take; 0 if unknown."""
    notes: tuple[str, ...] = ()


NO_STALENESS = -1
"""The value of ``staleness`` in a step's row if the step has no staleness."""

_ROW = struct.Struct("<ddqiiiiq7f")
ROW_BYTES = _ROW.size


def pack_step(rank: int, step: StepEvent) -> bytes:
    """Return one step as 76 bytes.  ddpnb sends and stores these bytes, and numpy reads them.

    On a rank, packing is faster than pickling.  The kernel does not need to unpack the rows.
    """
    staleness = NO_STALENESS if step.staleness is None else step.staleness
    return _ROW.pack(
        step.seconds,
        step.loss,
        step.num_samples,
        step.step,
        step.version,
        staleness,
        rank,
        step.num_bytes_sent,
        *step.parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """The events in one message from a rank.  ``sequence`` counts the rank's batches in a run."""

    run_id: str
    rank: int
    sequence: int
    header: RunHeader | None = None
    rows: bytes = b""
    """One row for each step and each call of ``ddpnb.log``, packed by ``pack_step``."""
    metrics: tuple[tuple[int, str, float], ...] = ()
    """Additional numbers that belong to a row.  Each entry has the row, the name and the number."""
    marks: tuple[Mark, ...] = ()
    evaluating: Evaluating | None = None

    @property
    def num_steps(self) -> int:
        """The number of rows."""
        return len(self.rows) // ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinInfo:
    """The position at which a restarted rank rejoins a run that other ranks still train."""

    first_batch: int
    """The number of event batches that this rank has sent so far."""
    first_step: int
    """The number of steps that this rank has taken so far."""
    began_at: float


class Evaluation(NamedTuple):
    """The scores of the model on held-out samples at one time during a run."""

    num_samples: int
    """The number of training samples that all workers had seen at that time."""
    seconds: float
    loss: float
    accuracy: float
    """The share of samples classified correctly; NaN if targets are not class labels."""


class Memory(NamedTuple):
    """The memory of a rank in bytes, by part.  0 means unknown."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """The bytes of the optimizer's state, such as momentum."""
    activations: int = 0
    """The bytes that autograd keeps for the backward pass, without parameters."""
    peak: int = 0
    """The maximum number of bytes on the rank's GPU, including buffers for messages."""

    @property
    def total(self) -> int:
        """The peak if it was measured, otherwise the sum of the parts."""
        return self.peak or sum(self)

    def scaled(self, scale: float) -> "Memory":
        """Return the memory of a model with ``scale`` times as many parameters as this model.

        Activations are left out, because their size is not published.
        """
        return Memory(*(round(scale * each) for each in self[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One rank's report after a run.  A rank that did not take part reports 0 steps."""

    run_id: str
    rank: int
    num_steps: int = 0
    num_bytes_received: int = 0
    """The number of bytes received in all steps.  The rows of the steps contain the bytes sent."""
    seconds: float = math.nan
    """Training seconds of this rank, without warm-up and evaluation."""
    final_loss: float = math.nan
    """Mean loss of the final model on the training split, if this rank evaluated the model."""
    held_out_loss: float = math.nan
    held_out_accuracy: float = math.nan
    """Share of held-out samples classified correctly; NaN if targets are not class labels."""
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)
    """The scores of the cell's ``validation_step`` and ``metric``, by name."""
    num_held_out: int = 0
    """The number of held-out samples in the final model's evaluation; 0 if unknown."""
    evaluations: tuple[Evaluation, ...] = ()
    """The held-out curve without the final model; empty if this rank evaluated no model."""
    num_lost_samples: int = 0
    """The number of samples for which no worker returned a gradient.  Only rank 0 reports this."""
    memory: Memory = field(default_factory=Memory)
    was_stopped: bool = False
    evaluation_was_cut: bool = False
    """True if the run took its last step but was interrupted during the evaluation."""
    notes: tuple[str, ...] = ()
    """Facts that this rank found out during the training, to show with the results."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "warnings", tuple(self.warnings))
        made = tuple(Evaluation(*each) for each in self.evaluations)  # the store returns lists
        object.__setattr__(self, "evaluations", made)
        object.__setattr__(self, "memory", Memory(*self.memory))
