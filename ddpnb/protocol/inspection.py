"""What ``%ddp_inspect`` asks of a rank, and what the rank has measured (all processes)."""

from dataclasses import dataclass

from ddpnb.protocol.devices import Devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.options import check_options, option
from ddpnb.protocol.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectSpec:
    """What to inspect: a model of the ranks' cells, or a task's."""

    model: str = ""
    """An expression on the ranks, as ``batch`` and ``loss`` are."""
    batch: str = option(
        "",
        "the model's input on the ranks: a tensor, or a tuple or a dict of its arguments",
        example="EXPR",
    )
    loss: str = option("", "a scalar made of `output`; by default its mean", example="EXPR")
    bucket_caps: tuple[float, ...] = option(
        (),
        "also with these bucket_cap_mb",
        flag="--bucket-cap",
        above=0,
        most_values=9,
        example="MB,MB",
    )
    task: RunSpec | None = None
    """In place of a model."""
    devices: Devices | None = None
    """Those whose time is computed; None: it is measured."""
    finds_unused: bool = False
    """Whether DDP looks for parameters without a part in the loss: on some rank there are some."""

    def __post_init__(self) -> None:
        check_options(self)
        beside = [each for each in ("batch", "loss") if getattr(self, each)]
        if beside and not self.model:
            raise UserError(f"--{beside[0]} goes with a model: a task has its own.")
        if self.model and not self.batch:
            raise UserError(
                f"Name the model's input too, an expression on the ranks: "
                f"%ddp_inspect {self.model} --batch x."
            )

    @property
    def title(self) -> str:
        """What is inspected, such as ``"model"``, ``"digits"``."""
        if self.task is None:
            return self.model
        return "the cell's model" if self.task.source else self.task.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank has found, alone: the model fits the batch, and has gradients."""

    parameters: dict[str, tuple[int, ...]]
    """The shape of each that needs a gradient."""
    unused: tuple[str, ...]
    """Parameters that had no part in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that one all-reduce sends."""

    names: tuple[str, ...]
    """Of the parameters, as they lie in the bucket."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapReport:
    """What one rank has measured with one value of ``bucket_cap_mb``."""

    cap_mb: float
    buckets: tuple[Bucket, ...]
    """Those of the measured steps, in the order in which they are sent."""
    steps: tuple[tuple[Span, ...], ...]
    """What the rank did in each measured step."""
    ready_seconds: dict[str, float]
    """When each gradient was there: after the backward pass began, the median of the steps."""
