"""The messages between the kernel and the ranks, through ipyparallel.  (Every process.)

Frozen, checked, picklable values: calls and specs go to the ranks, events and reports come back.
What reaches a rank that is busy goes through the fork server (``processes.RankCommand`` and
``KernelRequest.SIGNAL``).
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
from ddpnb.protocol.trace import RankSpans
from ddpnb.protocol.training_options import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The process and device of one rank."""

    rank: int
    world_size: int
    local_world_size: int
    """How many ranks its host has."""
    pid: int
    host: str
    device: str
    """``"cpu"`` or ``"cuda:1"``, as ``torch.device`` spells it."""
    device_name: str
    """A GPU's; empty for a CPU."""
    num_threads: int
    backend: str
    shares_device: bool = False
    """Whether another rank computes on the same GPU."""
    has_peer_access: bool | None = None
    """Whether its GPU reads the memory of the host's next one; None: there is none."""
    missing: tuple[str, ...] = ()
    """A sentence for each feature that is off because of a library's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(TrainingSpec):
    """One run: everything that a rank needs to repeat it exactly."""

    run_id: str
    strategy: str
    """As the user wrote it, with its options: ``"ddp"``, ``"ddp:hook=fp16"``."""
    repeat: int = 0
    """Which one of its strategy's; the runs of one repeat share their seed, and can be paired."""
    is_ceiling: bool = False
    """Whether it was added to the comparison as the ceiling of the speed: trained only as long as
    that needs, and not judged."""
    comparison: str = ""
    """The id that the runs of one comparison share: their cell's data are loaded once; or empty."""
    models: str = ""
    """The folder for the trained weights of each run; empty: they are not saved."""
    notes: tuple[str, ...] = ()
    """Sentences that stand beside the results."""
    num_points: int = 10
    """Points of the held-out curve where the user asks for no other number."""

    @property
    def data_seed(self) -> int:
        """The seed of the first repeat: while the data are loaded, the same in every repeat."""
        return (self.seed - self.repeat) % 2**63

    @property
    def model_file(self) -> Path | None:
        """The file with the ``state_dict`` of the trained model; None: it is not saved."""
        return Path(self.models) / f"{self.run_id}.pt" if self.models else None

    @property
    def own_momentum(self) -> float | None:
        """What the strategy's own option says, ``async:momentum=0.5``; None: it says nothing."""
        chosen = parse_strategy(self.strategy)
        value = chosen.options.get("momentum") if chosen.name in STRATEGIES else None
        return None if value is None else float(value)

    @property
    def used_momentum(self) -> float:
        """Of the default optimizer: the strategy's own, else that of all strategies."""
        return self.momentum if self.own_momentum is None else self.own_momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What a run turned out to be; its first rank sends it before the first step."""

    synchronous: bool
    """Whether all workers make step k together; otherwise each counts its own steps."""
    num_workers: int
    """Ranks (or, for ``dp``, replicas) that train."""
    num_threads: int
    """Intra-op CPU threads of each worker."""
    device: str
    backend: str
    num_parameters: int
    num_samples: int
    """Training samples that the run will see, over all workers."""
    num_ranks: int = 0
    """Ranks that report steps; 0: as many as workers."""
    num_devices: int = 0
    """GPUs, or ranks' shares of the CPU, that they compute on; 0: as many as workers."""
    sees_exposed: bool = True
    """Whether communication that holds up the computing can be distinguished from the rest."""
    is_emulated: bool = False
    """Whether the strategy is emulated; then its speed says nothing about the real one."""
    momentum: float = 0.0
    """Of the optimizer, where that is SGD and not Nesterov's."""
    notes: tuple[str, ...] = ()
    """What is emulated, synthetic or adjusted: one short sentence each, shown with every result."""


class Parts(NamedTuple):
    """The seconds of one step by part; all except ``hidden`` add up to the step."""

    data: float = 0.0
    """Fetching the batch and copying it to the device."""
    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0
    """Exchanging tensors while nothing else was computed: exposed, as ``waiting`` is."""
    optimizer: float = 0.0
    waiting: float = 0.0
    """For other ranks; where a strategy cannot measure it, it counts as communication."""
    hidden: float = 0.0
    """Exchanging tensors behind the backward pass: costs no time of its own."""


class MarkKind(StrEnum):
    """What happened to a rank; ``OTHER`` is in the text alone."""

    KILLED = "killed"
    """By a signal.  From the rank itself: a fault injected at the end of a step, which the kernel
    carries out once all the rank's steps have arrived."""
    DIED = "died"
    CAME_BACK = "came back"
    OTHER = ""

    @property
    def is_death(self) -> bool:
        """Whether the rank's process ended."""
        return self in (MarkKind.KILLED, MarkKind.DIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened during a run: a fault struck, a rank came back."""

    rank: int
    seconds: float
    """Training time since the run began."""
    text: str = ""
    """A few words, e.g. ``"3x slower"``; by default those of its kind."""
    kind: MarkKind = MarkKind.OTHER

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or self.kind.value)


class Evaluating(NamedTuple):
    """How far rank 0 has judged the models of a run that has been trained."""

    num_done: int
    num_all: int
    seconds: float
    """What those that are done took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step of one worker."""

    step: int = 0
    """0, 1, 2 ... on this worker."""
    seconds: float = math.nan
    """Training time at the end of the step, since the run began; without warm-up and evaluation."""
    num_samples: int
    """Samples this worker trained on in this step."""
    loss: float = math.nan
    """Mean loss over those samples, before the step's update; NaN if none is known."""
    staleness: int | None = None
    """Updates by others between the pull of the parameters and the use of the gradient."""
    version: int = 0
    """The number of the update that the gradient went into; 0: updates are not counted."""
    parts: Parts = field(default_factory=Parts)
    num_bytes_sent: int = 0
    """What this worker sent to others in this step."""
    num_bytes_received: int = 0
    """Likewise from others; not in its row: the run's report has the sum."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the step; these are not in its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a rank's checks of a run that can be trained."""

    num_samples: int
    """Of the training split on this rank; should be the same on all."""
    survives_deaths: bool
    """Whether the others train on if a rank other than 0 dies."""
    has_accuracy: bool = False
    """Whether the model has an accuracy on held-out samples; only rank 0 finds out."""
    num_epochs: float = 0.0
    """After which it will have trained for ``min_seconds``; 0: not asked for, or not known."""
    num_held_out: int = 0
    seconds_per_judged: float = 0.0
    """What judging one held-out sample takes rank 0; 0: not known."""
    seconds_per_trained: float = 0.0
    """What a forward and backward pass takes a worker for each sample; 0: not known."""


NO_STALENESS = -1
"""In a row: the step has no staleness."""

_ROW = struct.Struct("<ddqiiiiq7f")
ROW_BYTES = _ROW.size


def pack_step(rank: int, step: StepEvent) -> bytes:
    """Return one step as 76 bytes: what is sent and stored, and what numpy reads as a row.

    It costs a rank less than pickling, and the kernel nothing.
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
    """Events that one rank sends together; ``sequence`` counts 0, 1, 2 ... per rank and run."""

    run_id: str
    rank: int
    sequence: int
    header: RunHeader | None = None
    rows: bytes = b""
    """Each step, or call of ``ddpnb.log``, as ``pack_step`` packs it."""
    metrics: tuple[tuple[int, str, float], ...] = ()
    """Further numbers of a step, or that the user logged: index of the row, name, value."""
    marks: tuple[Mark, ...] = ()
    evaluating: Evaluating | None = None

    @property
    def num_steps(self) -> int:
        """How many rows there are."""
        return len(self.rows) // ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinInfo:
    """Where a new process of a dead rank rejoins a run that the others still train."""

    first_batch: int
    """The event batches of this rank so far."""
    first_step: int
    """Its steps so far."""
    began_at: float
    """``time.time()`` when the training began."""


class Evaluation(NamedTuple):
    """The model on held-out samples at one moment of a run."""

    num_samples: int
    """Seen by all workers until then."""
    seconds: float
    """Training time since the run began, on rank 0."""
    loss: float
    accuracy: float
    """NaN if targets are not class labels."""


class Memory(NamedTuple):
    """What a rank holds, in bytes; 0: not known."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's state: momentum and the like."""
    activations: int = 0
    """What autograd keeps of a forward pass until the backward pass, without the parameters."""
    peak: int = 0
    """The most that tensors had on its GPU while it trained, buffers of messages included."""

    @property
    def total(self) -> int:
        """The peak where it is measured, else the sum of the parts."""
        return self.peak or sum(self)

    def scaled(self, scale: float) -> "Memory":
        """Return what a published model holds, so many times as large as the one that is trained.

        Its activations are not known: no figure of them is published.
        """
        return Memory(*(round(scale * each) for each in self[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one rank returns when a run has ended; one that took no part has made no steps."""

    run_id: str
    rank: int
    num_steps: int = 0
    num_bytes_received: int = 0
    """In all steps; what was sent is in each step's row."""
    seconds: float = math.nan
    """Training time of this rank, without warm-up and evaluation."""
    final_loss: float = math.nan
    """Mean loss of the final model over the training split; on the evaluating rank only."""
    held_out_loss: float = math.nan
    held_out_accuracy: float = math.nan
    """Share of held-out samples classified correctly; NaN if targets are not class labels."""
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)
    """What the cell's ``validation_step`` and ``metric`` measured, by name."""
    num_held_out: int = 0
    """Held-out samples that the final model was evaluated on; 0 if not known."""
    evaluations: tuple[Evaluation, ...] = ()
    """The held-out curve up to the final model, which is not in it; on the evaluating rank only."""
    num_lost_samples: int = 0
    """Samples handed out without a gradient in return, over all workers; on rank 0 only."""
    memory: Memory = field(default_factory=Memory)
    was_stopped: bool = False
    """Whether it was stopped before its last step."""
    evaluation_was_cut: bool = False
    """Whether it had trained to its end, and was interrupted while it was evaluated."""

    def __post_init__(self) -> None:
        made = tuple(Evaluation(*each) for each in self.evaluations)  # stored ones are lists
        object.__setattr__(self, "evaluations", made)
        object.__setattr__(self, "memory", Memory(*self.memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script to run on a rank as if ``torchrun`` had started it."""

    name: str
    """As the user wrote it: a path, or the name of a module."""
    path: str = ""
    """Absolute; empty for a module, which is found as ``import`` does."""
    arguments: tuple[str, ...] = ()
    keeps_variables: bool = False
    """Whether its variables are to be those of later cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """A cell, or a script, to run on a rank."""

    source: str
    execution_count: int
    """The ``n`` of the notebook's ``In [n]``, so that tracebacks on the ranks name it."""
    run_id: str = ""
    """The run that ``ddpnb.log`` in this cell adds to; empty: none."""
    script: Script | None = None
    """The script that ``source`` was read from; None: a cell."""
    debug_rank: int | None = None
    """The rank that may ask questions, with ``breakpoint()`` or ``input()``."""
    is_traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a rank asks with ``input()``, as its debugger does; it waits for an answer."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception that ended a cell or a run on one rank."""

    rank: int
    name: str
    """The exception's class."""
    text: str
    traceback: tuple[str, ...] = ()
    """As IPython on the rank shows it."""
    failed_at: float
    """``time.time()`` on the rank when the exception was caught."""
    line: int = 0
    """Where the cell, or the script, was; 0 if in neither."""
    is_consequence: bool = False
    """Whether the rank failed only because another did: its connection was closed."""
    was_waiting: bool = True
    """For a consequence: whether the rank was waiting for others, and not computing."""
    is_death: bool = False
    """Whether the rank's process died; then ``text`` says how."""
    breaks_group: bool = False
    """Whether the ranks' next collectives would not match: the group must be formed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """How a cell ended on one rank."""

    failure: Failure | None = None
    num_collectives: int = 0
    """Collectives of the default group that had begun here when the cell ended."""
    trace: RankSpans | None = None
    """What was recorded; None: nothing was to be."""
    is_silent: bool = False
    """Whether there was no output, so that no message follows that would say where it ends."""


REMEDIES = {
    "DistributedDataParallel": "wrap it again, DistributedDataParallel({name}.module)",
    "FullyShardedDataParallel": "build the model again, and wrap it",
    "FSDPModule": "build the model again, and shard it",
    "ZeroRedundancyOptimizer": "make it again",
    "DeviceMesh": "make it again, with init_device_mesh",
    "ProcessGroup": "form it again, with dist.new_group",
}
"""Torch's classes that keep the group they were made with; what to do once that was aborted."""


class StaleVariable(NamedTuple):
    """A variable on a rank that holds on to an aborted process group."""

    name: str
    """The variable, or the expression that leads to the object: ``"trainer.model"``."""
    kind: str
    """Which of the classes in ``REMEDIES`` it is."""
