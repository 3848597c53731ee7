"""What crosses between the notebook's kernel and the ranks?  (Both sides.)

Frozen, checked, picklable values only: specs go down, events and reports come
back.  Nothing here imports torch, IPython or matplotlib.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ddpnb.errors import UserError, one_of

CELL_TASK = "cell"
"""The task whose model, data, loss and optimizer the notebook's cell defines."""

STRATEGIES: Mapping[str, str] = {
    "single": "one device",
    "dp": "torch DataParallel; emulated on CPU threads where there are not two GPUs",
    "ddp": "torch DistributedDataParallel",
    "async": "one parameter server, workers never wait for each other",
}
"""Strategy names, in the order shown to users, each with one line of what it is."""

TASKS: Mapping[str, str] = {
    "digits": "scikit-learn's 1797 handwritten digits, 8x8 pixels: real data",
    "synthetic": "CIFAR-shaped images made from a seed: synthetic data",
}
"""Built-in task names, each with one line of what it is."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One training: everything a rank must know to repeat it exactly."""

    run_id: str
    strategy: str
    task: str = CELL_TASK
    source: str = ""
    """The comparison cell; defines ``model()`` and ``data(split)`` when ``task`` is ``"cell"``."""
    num_epochs: float = 2.0
    """Passes over the training data; for asynchronous runs counted in samples seen."""
    batch_size: int = 256
    """The global batch: samples per step over all workers together."""
    learning_rate: float = 0.05
    seed: int = 0
    repeat: int = 0
    num_warmup_steps: int = 3
    """Steps trained on a throwaway replica first, so that no clock sees a cold start."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise one_of("strategy", self.strategy, STRATEGIES)
        if self.task != CELL_TASK and self.task not in TASKS:
            raise one_of("task", self.task, TASKS)
        if self.task == CELL_TASK and not self.source.strip():
            raise UserError(
                "Nothing to train: define model() and data(split) in the cell, "
                f"or name a task with --task ({', '.join(TASKS)})."
            )
        if not (math.isfinite(self.num_epochs) and self.num_epochs > 0):
            raise UserError(f"--epochs must be greater than 0, not {self.num_epochs}.")
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, not {self.batch_size}.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UserError(f"--lr must be greater than 0, not {self.learning_rate}.")
        if self.seed < 0:
            raise UserError(f"--seed must not be negative, not {self.seed}.")


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
    notes: tuple[str, ...] = ()
    """What is emulated, synthetic or adjusted: one short sentence each, shown with every result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step of one worker, or one call of ``ddpnb.log``."""

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
    metrics: tuple[tuple[str, float], ...] = ()
    """Further numbers of the user's own, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """What one rank flushed at once; ``sequence`` counts 0, 1, 2 ... per rank and run."""

    run_id: str
    rank: int
    sequence: int
    header: RunHeader | None = None
    steps: tuple[StepEvent, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """How a cell ended on one rank."""

    rank: int
    failure: Failure | None = None
    num_batches_sent: int = 0
    """Event batches that ``ddpnb.log`` flushed."""
    num_collectives: int = 0
    """Collectives of the default group that had begun here when the cell ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
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


@dataclass(frozen=True, slots=True)
class OnRank:
    """A call by name of a function of ``ddpnb.rank.calls``: ``OnRank("state")()``.

    The notebook's side never imports the rank's: this is the one import between
    them, and it happens on the rank.
    """

    function: str

    def __call__(self, *args: object) -> object:
        """Import the function and call it; runs on the rank."""
        return getattr(importlib.import_module("ddpnb.rank.calls"), self.function)(*args)
