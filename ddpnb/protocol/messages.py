"""What crosses between the notebook's kernel and the ranks?  (Both sides.)

Frozen, checked, picklable values only: specs go down, events and reports come
back.  Nothing here imports torch, IPython or matplotlib.
"""

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ddpnb.protocol.choices import check_transport
from ddpnb.protocol.training_options import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Where one rank lives and what it computes with."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    host: str
    device: str
    """``"cpu"`` or ``"cuda:1"``, as ``torch.device`` spells it."""
    device_name: str
    num_threads: int
    backend: str
    shares_device: bool = False
    """Whether another rank computes on the same GPU."""
    missing: tuple[str, ...] = ()
    """What is off because a library here is of another version: one sentence each."""


MODEL_FILE = "model.pt"
"""What a run's trained model is saved as, among its checkpoints: a ``state_dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(TrainingSpec):
    """One training: everything a rank must know to repeat it exactly."""

    run_id: str
    strategy: str
    """As it was written, with its options: ``"ddp"``, ``"ddp:hook=fp16"``."""
    repeat: int = 0
    checkpoints: str = ""
    """The folder that holds one of each run's checkpoints; empty: none are kept."""
    resumed: str = ""
    """What the user calls the run that is resumed, whose id ``resume`` is: ``"first/ddp#1"``."""

    def __post_init__(self) -> None:
        TrainingSpec.__post_init__(self)  # super() does not work in a slotted dataclass
        check_transport(self.strategy, self.transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What a run turned out to be, told by its first rank before the first step."""

    run_id: str
    strategy: str
    synchronous: bool
    """Whether all workers make step k together; else each counts its own steps."""
    num_workers: int
    """Ranks (or, for ``dp``, replicas) that train."""
    num_threads: int
    """Intra-op CPU threads of each worker."""
    device: str
    backend: str
    num_parameters: int
    num_samples: int
    """Training samples the whole run will see, over all workers."""
    num_samples_before: int = 0
    """Those that the run it resumes had seen when the checkpoint was made."""
    is_emulated: bool = False
    """Whether the strategy's real form cannot run here: its speed says nothing about that."""
    notes: tuple[str, ...] = ()
    """What is emulated, synthetic or adjusted: one short sentence each, shown with every result."""


class Parts(NamedTuple):
    """Where the seconds of one step went; they add up to the step, but for ``hidden``."""

    data: float = 0.0
    """Fetching the batch and bringing it to the device."""
    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0
    """Exchanging tensors while nothing else was computed: the exposed part."""
    optimizer: float = 0.0
    waiting: float = 0.0
    """For other ranks to be ready; where a strategy cannot tell, it counts as communication."""
    hidden: float = 0.0
    """Exchanging tensors behind the backward pass: costs no time of its own."""


NO_PARTS = Parts()


class MarkKind(StrEnum):
    """What happened to a rank; its text says what there is no kind for."""

    KILLED = "killed"
    """By a signal: on purpose, or by somebody else."""
    DIED = "died"
    CAME_BACK = "came back"
    OTHER = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened in a run at one moment: a fault struck, a rank came back."""

    rank: int
    seconds: float
    """Training time since the run began."""
    text: str = ""
    """A few words, e.g. ``"3x slower"``; where none are given, those of its kind."""
    kind: MarkKind = MarkKind.OTHER

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or self.kind.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step of one worker."""

    step: int
    """0, 1, 2 ... on this worker."""
    seconds: float
    """Training time since the run began, read after the step; warm-up and evaluation left out."""
    num_samples: int
    """Samples this worker trained on in this step."""
    loss: float
    """Mean loss over those samples, before the step's update; NaN where none was given."""
    staleness: int | None = None
    """Updates by others between the pull of the parameters and the use of the gradient."""
    parts: Parts = NO_PARTS
    num_bytes_sent: int = 0
    """What this worker handed over for others in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a rank knows of a training that can be trained."""

    num_samples: int
    """Of the training split here; should be as many on every rank."""
    survives_deaths: bool
    """Whether the others train on where a rank other than 0 dies."""


NO_STALENESS = -1
"""Stands for "this step has no staleness" in a row."""

_ROW = struct.Struct("<ddqqiiq7f")
ROW_BYTES = _ROW.size


def pack_step(rank: int, step: StepEvent) -> bytes:
    """Return one step as the 76 bytes that cross, lie in the store and are read as numpy rows.

    Packing costs a rank less than pickling would, and the kernel nothing at all.
    """
    stale = NO_STALENESS if step.staleness is None else step.staleness
    return _ROW.pack(
        step.seconds,
        step.loss,
        step.num_samples,
        step.step,
        stale,
        rank,
        step.num_bytes_sent,
        *step.parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """What one rank flushed at once; ``sequence`` counts 0, 1, 2 ... per rank and run."""

    run_id: str
    rank: int
    sequence: int
    header: RunHeader | None = None
    rows: bytes = b""
    """What ``pack_step`` made of each step, or of each call of ``ddpnb.log``."""
    metrics: tuple[tuple[int, str, float], ...] = ()
    """Further numbers of the user's own: index of the row, name, value."""
    marks: tuple[Mark, ...] = ()

    @property
    def num_steps(self) -> int:
        """How many rows there are."""
        return len(self.rows) // ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinInfo:
    """Where a rank comes into a run that the others train already, after its process had died."""

    first_batch: int
    """How many event batches of this rank there are."""
    first_step: int
    """How many steps of it."""
    began_at: float
    """``time.time()`` when the training began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one rank returns when a run has ended."""

    run_id: str
    rank: int
    took_part: bool
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = math.nan
    """Training time of this rank, warm-up and evaluation left out."""
    final_loss: float = math.nan
    """Mean loss of the final model over the training split; on the evaluating rank only."""
    held_out_loss: float = math.nan
    held_out_accuracy: float = math.nan
    """Share of held-out samples classified right; NaN where targets are not class labels."""
    num_batches_sent: int = 0
    """Event batches flushed, so that the notebook knows when it has them all."""
    num_lost_samples: int = 0
    """Samples handed out whose gradient never arrived, over all workers; on rank 0 only."""
    num_parameter_bytes: int = 0
    """What this rank holds of the parameters when training ends; 0 where it is not known."""
    num_optimizer_bytes: int = 0
    """What it holds of the optimizer's state."""
    was_stopped: bool = False
    """Whether it ended before its last step because it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """One notebook cell to run on a rank."""

    source: str
    execution_count: int
    """The notebook's own ``In [n]``, so that tracebacks on the ranks name it."""
    run_id: str = ""
    """The run that ``ddpnb.log`` in this cell adds to; none if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception that ended a cell or a run on one rank."""

    rank: int
    name: str
    """The exception's class."""
    text: str
    traceback: tuple[str, ...] = ()
    """The formatted traceback, as IPython on the rank would show it."""
    failed_at: float
    """``time.time()`` on the rank when the exception arrived."""
    is_consequence: bool = False
    """Whether it failed only because another rank did: its connection was closed."""
    was_waiting: bool = True
    """Of a consequence: whether the rank was waiting for others, or was ended in the midst."""
    is_death: bool = False
    """Whether the rank's process died; ``text`` then says how."""
    breaks_group: bool = False
    """Whether the ranks' next collectives would not meet either: the group is to be formed anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """How a cell ended on one rank."""

    rank: int
    failure: Failure | None = None
    num_batches_sent: int = 0
    """Event batches that ``ddpnb.log`` flushed."""
    num_collectives: int = 0
    """Collectives of the default group that had begun here when the cell ended."""


class StaleVariable(NamedTuple):
    """A variable on a rank that keeps the process group it was made with."""

    name: str
    """The variable, or the expression that leads to the object: ``"trainer.model"``."""
    kind: str
    """Torch's class of it: ``"DistributedDataParallel"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Where one rank stands at one moment."""

    rank: int
    is_busy: bool
    """Whether it runs a cell or trains."""
    cell: int = 0
    """The ``n`` of the cell ``In [n]`` that it is at; 0 where that is not known."""
    line: int = 0
    """The line of that cell; 0 where that is not known."""
    call: str = ""
    """The call of ``torch.distributed`` that it waits in, e.g. ``"all_reduce"``; empty if none."""
    in_backward: bool = False
    """Whether it is inside ``backward()``, where DDP's all-reduces run."""
    tensor: str = ""
    """What that call sends, e.g. ``"Float [3, 4]"``; empty where that is not known."""
    peer: int | None = None
    """The rank that it sends to or receives from."""
    num_collectives: int = 0
    """Collectives of the default group that have begun here."""
    cpu_seconds: float = 0.0
    """Processor time that the process has used."""
