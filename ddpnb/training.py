"""What can be chosen about a training, whatever the strategy?  (Both sides.)

Every choice is written once, as a field of ``TrainingSpec``: the option of the magic, its
help, its check and its name in Python are read off the field.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddpnb import catalogue
from ddpnb.catalogue import CELL_TASK, TASKS, Value
from ddpnb.errors import UserError, one_of
from ddpnb.faults import parse_kills, parse_slow

AMP = ("none", "bf16")
"""What mixed precision there is: bfloat16 needs no scaling of the loss."""

LR_SCALING = ("none", "linear", "sqrt")
"""How the learning rate may grow with the number of workers."""

TRANSPORTS = ("auto", "shm", "gloo", "rpc")
"""How an asynchronous worker and its server may exchange tensors."""

GROUPS = ("training", "steps", "data", "faults on purpose", "checkpoints")
"""Under which headings the choices are told, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How a field of ``TrainingSpec`` is chosen in a magic's line."""

    option: str
    """``"--batch-size"``; in Python it is called ``batch_size``."""
    about: str
    group: str
    default: Value | tuple[str, ...] | None
    kind: type
    """What its text is read as; ``bool`` for a switch, ``tuple`` for a list."""
    example: str = "N"
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    is_least_allowed: bool = True
    most: float = math.inf

    @property
    def keyword(self) -> str:
        """What it is called in Python."""
        return self.option.lstrip("-").replace("-", "_")


def _flag(default: Value | tuple[str, ...] | None, option: str, **told: Any) -> Any:
    flag = Flag(option=option, default=default, **{"kind": type(default)} | told)
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """One way of training: the same for every strategy that is compared."""

    task: str = _flag(
        CELL_TASK,
        "--task",
        group="training",
        example="TASK",
        about=f"{' | '.join(TASKS)}, with options as in synthetic:samples=512; "
        "left out: the cell's own",
    )
    source: str = ""
    """The comparison cell; defines ``model()`` and ``data(split)`` when ``task`` is ``"cell"``."""
    cell: int = 0
    """The ``n`` of the cell ``In [n]`` that ``source`` stands in; 0: in none."""
    num_epochs: float = _flag(
        2.0,
        "--epochs",
        group="training",
        least=0,
        is_least_allowed=False,
        about="passes over the training data; for asynchronous runs counted in samples seen",
    )
    batch_size: int = _flag(
        256,
        "--batch-size",
        group="training",
        least=1,
        about="the global batch: samples a step, over all workers together",
    )
    learning_rate: float = _flag(
        0.05,
        "--lr",
        group="training",
        least=0,
        is_least_allowed=False,
        about="learning rate of the default optimizer, SGD with momentum 0.9",
    )
    seed: int = _flag(
        0,
        "--seed",
        group="training",
        least=0,
        most=2**63 - 1,
        about="of the weights and the order of samples",
    )
    num_warmup_steps: int = 3
    """Steps trained on a throwaway replica first, so that no clock sees a cold start."""
    accumulate: int = _flag(
        1,
        "--accumulate",
        group="steps",
        least=1,
        about="parts that a worker's share of a step is cut into, to save memory",
    )
    amp: str = _flag(
        "none",
        "--amp",
        group="steps",
        choices=AMP,
        example="TYPE",
        about="what the forward pass computes in where that is safe",
    )
    clip: float | None = _flag(
        None,
        "--clip",
        kind=float,
        group="steps",
        least=0,
        is_least_allowed=False,
        about="largest norm of all gradients together; larger ones are scaled down to it",
    )
    lr_scaling: str = _flag(
        "none",
        "--lr-scaling",
        group="steps",
        choices=LR_SCALING,
        example="RULE",
        about="how the learning rate grows with the number of workers",
    )
    num_lr_warmup_epochs: float = _flag(
        0.0,
        "--lr-warmup",
        group="steps",
        least=0,
        about="epochs over which the learning rate grows from almost nothing",
    )
    sync_batchnorm: bool = _flag(
        False,
        "--sync-batchnorm",
        group="steps",
        about="BatchNorm takes its statistics over all ranks; on GPUs only",
    )
    transport: str = _flag(
        "auto",
        "--transport",
        group="steps",
        choices=TRANSPORTS,
        example="WAY",
        about="how asynchronous workers and their server exchange tensors",
    )
    num_data_workers: int = _flag(
        0,
        "--data-workers",
        group="data",
        least=0,
        most=256,
        about="processes of each rank that fetch samples ahead (torch's DataLoader)",
    )
    slow: tuple[str, ...] = _flag(
        (),
        "--slow",
        group="faults on purpose",
        example="1:3x",
        about="rank 1 computes 3 times as long; 1:50ms: its steps take 50 ms longer; "
        "several with commas",
    )
    jitter: float = _flag(
        0.0,
        "--jitter",
        group="faults on purpose",
        example="20%",
        least=0,
        most=100,
        about="each step of each rank takes longer at random, by up to this share",
    )
    kill: tuple[str, ...] = _flag(
        (),
        "--kill",
        group="faults on purpose",
        example="1@5s",
        about="rank 1 is killed after 5 seconds of training",
    )
    save_every: float = _flag(
        0.0,
        "--save-every",
        group="checkpoints",
        least=0,
        about="epochs between checkpoints, one at the end among them, kept in "
        "data/runs/checkpoints; the last two stay",
    )
    resume: str = _flag(
        "",
        "--resume",
        group="checkpoints",
        example="RUN",
        about="begin from the last checkpoint of these runs, as %ddp_runs lists them",
    )

    def __post_init__(self) -> None:
        catalogue.task(self.task)
        if self.task == CELL_TASK and not self.source.strip():
            raise UserError(
                "Nothing to train: define model() and data(split) in the cell, "
                f"or name a task with --task ({', '.join(TASKS)})."
            )
        for name, flag in flags():
            _check(flag, getattr(self, name))
        for text in self.slow:
            parse_slow(text)
        parse_kills(self.kill)


def flags() -> Iterator[tuple[str, Flag]]:
    """Yield each field of ``TrainingSpec`` that is a choice, with how it is chosen."""
    for entry in dataclasses.fields(TrainingSpec):
        if "flag" in entry.metadata:
            yield entry.name, entry.metadata["flag"]


def _check(flag: Flag, value: Any) -> None:
    if flag.choices and value not in flag.choices:
        raise one_of(flag.option, value, flag.choices)
    if flag.least == -math.inf or value is None:
        return
    if value > flag.most:
        raise UserError(f"{flag.option} must be at most {flag.most}, not {value}.")
    is_low = value < flag.least or (value == flag.least and not flag.is_least_allowed)
    if is_low or (isinstance(value, float) and not math.isfinite(value)):
        bound = "at least" if flag.is_least_allowed else "greater than"
        raise UserError(f"{flag.option} must be {bound} {flag.least:g}, not {value}.")
