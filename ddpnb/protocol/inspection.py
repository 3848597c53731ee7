"""The request of ``%ddp_inspect``, and the ranks' measurements.  Used in every process."""

import shlex
from dataclasses import dataclass

from ddpnb.protocol.devices import Devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.options import check_options, option
from ddpnb.protocol.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectSpec:
    """The model to inspect: a model from the ranks' cells, or the model of a task."""

    model: str = ""
    """An expression for the model on the ranks; empty if the model of ``task`` is inspected."""
    batch: str = option(
        "",
        "input of the model on the ranks: a tensor, or a tuple or dict of arguments",
        example="EXPR",
    )
    loss: str = option("", "loss, computed from `output`; by default its mean", example="EXPR")
    bucket_caps: tuple[float, ...] = option(
        (),
        "additional bucket sizes (bucket_cap_mb) to measure, in MB",
        flag="--bucket-cap",
        above=0,
        most_values=9,
        example="MB,MB",
    )
    task: RunSpec | None = None
    """The run of the task to inspect; None if ``model`` names the model."""
    devices: Devices | None = None
    """The devices to emulate.  If None, ranks measure real times."""
    finds_unused: bool = False
    """True if DDP looks for parameters that do not contribute to the loss on some rank."""

    def __post_init__(self) -> None:
        check_options(self)
        beside = [each for each in ("batch", "loss") if getattr(self, each)]
        if beside and not self.model:
            raise UserError(f"--{beside[0]} needs a model. Name the model, or remove the option.")
        if self.model and not self.batch:
            raise UserError(
                "The model's input is missing. Name it: "
                f"%ddp_inspect {shlex.quote(self.model)} --batch x."
            )

    @property
    def title(self) -> str:
        """The name of the inspected model or task, such as ``"model"`` or ``"digits"``."""
        if self.task is None:
            return self.model
        return "the cell's model" if self.task.source else self.task.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The parameters that one rank found after a forward and a backward pass of the model."""

    parameters: dict[str, tuple[int, ...]]
    """The shape of each parameter that needs a gradient, by name."""
    unused: tuple[str, ...]
    """The names of parameters that the loss does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The gradients that DDP sends in one all-reduce."""

    names: tuple[str, ...]
    """The names of the parameters, in the order in which the bucket holds their gradients."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapReport:
    """One rank's measurements with one value of ``bucket_cap_mb``."""

    cap_mb: float
    buckets: tuple[Bucket, ...]
    """The buckets of the measured steps, in the order in which DDP sends them."""
    steps: tuple[tuple[Span, ...], ...]
    """The rank's spans in each measured step."""
    ready_seconds: dict[str, float]
    """Median seconds from the start of the backward pass until each gradient is ready."""
