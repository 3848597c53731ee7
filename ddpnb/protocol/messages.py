"""The messages between the kernel and the ranks, sent through ipyparallel.  (Every process.)

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
from ddpnb.protocol.trace import RankSpans
from ddpnb.protocol.training_options import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The process and device of one rank."""

    rank: int
    world_size: int
    local_world_size: int
    """The number of ranks on the rank's host."""
    pid: int
    host: str
    device: str
    """The device in torch's notation, ``"cpu"`` or ``"cuda:1"``."""
    device_name: str
    """The name of the GPU; empty for a CPU."""
    num_threads: int
    backend: str
    shares_device: bool = False
    """True if another rank computes on the same GPU."""
    has_peer_access: bool | None = None
    """True if the rank's GPU can read the memory of the host's next GPU; None: no next GPU."""
    missing: tuple[str, ...] = ()
    """A sentence for each feature that is turned off because of a library's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(TrainingSpec):
    """Everything that a rank needs to train a run, or to repeat the run exactly."""

    run_id: str
    strategy: str
    """The strategy and its options, in the user's notation: ``"ddp"``, ``"ddp:hook=fp16"``."""
    repeat: int = 0
    """The number of this repeat of the strategy; all runs of one repeat share a seed."""
    is_ceiling: bool = False
    """True if ddpnb added this run as the ceiling; the run is short, without an evaluation."""
    comparison: str = ""
    """The id of the run's comparison, for which ranks load the cell's data once; may be empty."""
    models: str = ""
    """The folder for the trained weights of each run; empty: ddpnb does not save them."""
    notes: tuple[str, ...] = ()
    """Sentences that ddpnb shows with the results."""
    num_points: int = 10
    """The number of points of the held-out curve if the user does not choose one."""

    @property
    def data_seed(self) -> int:
        """The seed of the first repeat, with which every repeat loads the data."""
        return (self.seed - self.repeat) % 2**63

    @property
    def model_file(self) -> Path | None:
        """The file for the ``state_dict`` of the trained model; None: the model is not saved."""
        return Path(self.models) / f"{self.run_id}.pt" if self.models else None

    @property
    def own_momentum(self) -> float | None:
        """The momentum from the strategy's option, ``async:momentum=0.5``; None: not given."""
        chosen = parse_strategy(self.strategy)
        value = chosen.options.get("momentum") if chosen.name in STRATEGIES else None
        return None if value is None else float(value)

    @property
    def used_momentum(self) -> float:
        """The default optimizer's momentum: the strategy's own, or the one for all strategies."""
        return self.momentum if self.own_momentum is None else self.own_momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The facts about a run that its first rank sends before the first step."""

    synchronous: bool
    """True if all workers make each step together; otherwise each worker counts its own steps."""
    num_workers: int
    """The number of ranks that train (for ``dp``: of replicas)."""
    num_threads: int
    """The number of intra-op CPU threads of each worker."""
    device: str
    backend: str
    num_parameters: int
    num_samples: int
    """The number of training samples that all workers together will see."""
    num_ranks: int = 0
    """The number of ranks that report steps; 0: equal to the number of workers."""
    num_devices: int = 0
    """The number of GPUs, or of ranks' CPU shares, in use; 0: equal to the number of workers."""
    sees_exposed: bool = True
    """True if ddpnb can distinguish exposed communication from hidden communication."""
    is_emulated: bool = False
    """True if the strategy is emulated; its speed then differs from the real strategy's speed."""
    momentum: float = 0.0
    """The optimizer's momentum if the optimizer is SGD without Nesterov momentum; otherwise 0."""
    notes: tuple[str, ...] = ()
    """Short sentences about emulated, synthetic or adjusted parts, shown with every result."""


class Parts(NamedTuple):
    """The seconds of each part of one step; all parts except ``hidden`` add up to the step."""

    data: float = 0.0
    """Seconds to fetch the batch and to copy the batch to the device."""
    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0
    """Seconds of exposed communication: the rank exchanges tensors and computes nothing."""
    optimizer: float = 0.0
    waiting: float = 0.0
    """Seconds of waiting for other ranks; part of ``communication`` if it cannot be measured."""
    hidden: float = 0.0
    """Seconds of communication during the backward pass, which does not lengthen the step."""


class MarkKind(StrEnum):
    """The kind of an event on a rank."""

    KILLED = "killed"
    """A signal killed the rank.  If the rank itself sends this mark, a ``--kill`` fault is due: the
    kernel kills the rank when all its steps have arrived."""
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
    """An event on a rank during a run: a fault on purpose, a death, a restart."""

    rank: int
    seconds: float
    """Training time since the run began."""
    text: str = ""
    """A description in a few words, e.g. ``"3x slower"``; default: the kind in words."""
    kind: MarkKind = MarkKind.OTHER

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or self.kind.value)


class Evaluating(NamedTuple):
    """Rank 0's progress in evaluating the models of a run after training."""

    num_done: int
    num_all: int
    seconds: float
    """The seconds of the evaluations that are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step of one worker."""

    step: int = 0
    """The number of the step on this worker: 0, 1, 2 ..."""
    seconds: float = math.nan
    """Training time from the run's begin to the step's end, without warm-up and evaluation."""
    num_samples: int
    """The number of samples that this worker trained on in this step."""
    loss: float = math.nan
    """Mean loss over the step's samples, before the update; NaN if unknown."""
    staleness: int | None = None
    """Other workers' updates between this worker's pull of the parameters and its update."""
    version: int = 0
    """The number of the update that used the gradient; 0: updates are not counted."""
    parts: Parts = field(default_factory=Parts)
    num_bytes_sent: int = 0
    """The bytes that this worker sent to other workers in this step."""
    num_bytes_received: int = 0
    """The bytes that this worker received; not in the step's row, summed in the run's report."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the step, which are not in the step's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A rank's result after it has checked that a run can be trained."""

    num_samples: int
    """The size of the training split on this rank, which should be equal on all ranks."""
    survives_deaths: bool
    """True if the run continues when a rank other than 0 dies."""
    has_accuracy: bool = False
    """True if the model has an accuracy on held-out samples; only rank 0 checks."""
    num_epochs: float = 0.0
    """The epochs that take ``min_seconds`` of training; 0: not requested, or unknown."""
    num_held_out: int = 0
    seconds_per_judged: float = 0.0
    """Seconds in which rank 0 evaluates one held-out sample; 0: unknown."""
    seconds_per_trained: float = 0.0
    """Seconds of a worker's forward and backward pass per sample; 0: unknown."""


NO_STALENESS = -1
"""The value in a row for a step without staleness."""

_ROW = struct.Struct("<ddqiiiiq7f")
ROW_BYTES = _ROW.size


def pack_step(rank: int, step: StepEvent) -> bytes:
    """Return one step as 76 bytes, which ddpnb sends and stores, and which numpy reads as a row.

    Packing takes a rank less time than pickling.  The kernel need not unpack the rows.
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
    """The events that one rank sends together; ``sequence`` counts batches per rank and run."""

    run_id: str
    rank: int
    sequence: int
    header: RunHeader | None = None
    rows: bytes = b""
    """The steps and calls of ``ddpnb.log``, each packed by ``pack_step``."""
    metrics: tuple[tuple[int, str, float], ...] = ()
    """Further numbers of steps, and numbers that the user logged: index of the row, name, value."""
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
    """The number of steps that this rank has made so far."""
    began_at: float
    """The ``time.time()`` at which the training began."""


class Evaluation(NamedTuple):
    """The scores of the model on held-out samples at one moment of a run."""

    num_samples: int
    """The number of training samples that all workers had seen at this moment."""
    seconds: float
    """Training time since the run began, on rank 0."""
    loss: float
    accuracy: float
    """NaN if targets are not class labels."""


class Memory(NamedTuple):
    """The memory of a rank by part, in bytes; 0: unknown."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """The bytes of the optimizer's state, such as momentum."""
    activations: int = 0
    """The bytes that autograd keeps from the forward to the backward pass, without parameters."""
    peak: int = 0
    """The largest number of bytes of tensors on the rank's GPU, with buffers of messages."""

    @property
    def total(self) -> int:
        """The peak if it was measured, otherwise the sum of the parts."""
        return self.peak or sum(self)

    def scaled(self, scale: float) -> "Memory":
        """Return the memory of a published model with ``scale`` times the trained parameters.

        The activations are left out, because they are not published.
        """
        return Memory(*(round(scale * each) for each in self[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One rank's report after a run; a rank that took no part reports 0 steps."""

    run_id: str
    rank: int
    num_steps: int = 0
    num_bytes_received: int = 0
    """The bytes received in all steps; the bytes sent are in each step's row."""
    seconds: float = math.nan
    """Training time of this rank, without warm-up and evaluation."""
    final_loss: float = math.nan
    """Mean loss of the final model on the training split; only the evaluating rank reports it."""
    held_out_loss: float = math.nan
    held_out_accuracy: float = math.nan
    """The share of held-out samples classified correctly; NaN if targets are not class labels."""
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)
    """The scores of the cell's ``validation_step`` and ``metric``, by name."""
    num_held_out: int = 0
    """The number of held-out samples that the final model was evaluated on; 0: unknown."""
    evaluations: tuple[Evaluation, ...] = ()
    """The held-out curve without the final model; only the evaluating rank reports it."""
    num_lost_samples: int = 0
    """Samples of all workers for which no gradient was returned; only rank 0 reports them."""
    memory: Memory = field(default_factory=Memory)
    was_stopped: bool = False
    """True if the run was stopped before its last step."""
    evaluation_was_cut: bool = False
    """True if the run made its last step, and was interrupted during the evaluation."""

    def __post_init__(self) -> None:
        made = tuple(Evaluation(*each) for each in self.evaluations)  # from the store: lists
        object.__setattr__(self, "evaluations", made)
        object.__setattr__(self, "memory", Memory(*self.memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script to run on a rank as if ``torchrun`` had started it."""

    name: str
    """The path of a script or the name of a module, in the user's words."""
    path: str = ""
    """The absolute path of the script; empty for a module, which Python imports by name."""
    arguments: tuple[str, ...] = ()
    keeps_variables: bool = False
    """True if later cells see the script's variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """A cell, or a script, to run on a rank."""

    source: str
    execution_count: int
    """The ``n`` of the notebook's ``In [n]``, which tracebacks on the ranks show."""
    run_id: str = ""
    """The run to which ``ddpnb.log`` in this cell adds numbers; may be empty."""
    script: Script | None = None
    """The script that ``source`` was read from; None: ``source`` is a cell."""
    debug_rank: int | None = None
    """The rank that may ask the user, through ``breakpoint()`` or ``input()``."""
    is_traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question of a rank's ``input()`` or debugger, which waits for the answer."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception that ended a cell or a run on one rank."""

    rank: int
    name: str
    """The name of the exception's class."""
    text: str
    traceback: tuple[str, ...] = ()
    """The lines of the traceback that IPython on the rank shows."""
    failed_at: float
    """The ``time.time()`` on the rank when ddpnb caught the exception."""
    line: int = 0
    """The line of the cell or script that failed; 0: the exception has no such line."""
    is_consequence: bool = False
    """True if the rank failed only because another rank did, which closed a connection."""
    was_waiting: bool = True
    """For a consequence: True if the rank waited for other ranks, False if it computed."""
    is_death: bool = False
    """True if the rank's process died; ``text`` then describes the death."""
    breaks_group: bool = False
    """True if the ranks' next collectives would not match, so the group must be formed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """The result of a cell on one rank."""

    failure: Failure | None = None
    num_collectives: int = 0
    """The collectives of the default group that had begun on this rank when the cell ended."""
    trace: RankSpans | None = None
    """The recorded spans; None: the cell was not traced."""
    is_silent: bool = False
    """True if the cell printed nothing, so that no message marks the end of its output."""


REMEDIES = {
    "DistributedDataParallel": "wrap the model again: DistributedDataParallel({name}.module)",
    "FullyShardedDataParallel": "build the model again and wrap it",
    "FSDPModule": "build the model again and shard it",
    "ZeroRedundancyOptimizer": "create the optimizer again",
    "DeviceMesh": "create the mesh again with init_device_mesh",
    "ProcessGroup": "create the group again with dist.new_group",
}
"""Torch's classes that keep a process group, each with the fix after the group was aborted."""


class StaleVariable(NamedTuple):
    """A variable on a rank that belongs to an aborted process group."""

    name: str
    """The variable, or an expression for the object: ``"trainer.model"``."""
    kind: str
    """The class in ``REMEDIES`` to which the object belongs."""
