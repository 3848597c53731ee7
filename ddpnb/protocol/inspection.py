"""The requests of ``%ddp_inspect``, ``%ddp_check`` and ``%ddp_samples``, and the ranks' reports.

Used in every process.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    ready_seconds: dict[str, float]
    """Median seconds from the start of the backward pass until each gradient is ready."""


# -- replicas and samples ------------------------------------------------------------------

CHUNK_ELEMENTS = 2**16
"""The number of tensor elements in a chunk.  A chunk has one digest and is sent in one piece."""
DIGEST_BYTES = 16

Indices = NDArray[np.integer[Any]]
"""The indices of samples, in the order in which a sampler yields them."""


class Part(StrEnum):
    """The parts of a replica that ddpnb compares, with their names in tables."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    STATE = "state"
    VALUES = "values"
    """The values of one or more tensors that the user names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """The digests of one tensor of one rank."""

    shape: tuple[int, ...] = ()
    kind: str = ""
    digests: bytes = b""
    """The digests of all chunks, one after another.  Each digest has ``DIGEST_BYTES`` bytes."""

    def chunk(self, number: int) -> bytes:
        """Return the digest of a chunk."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the tensor."""
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The tensors that one rank holds under one name."""

    parts: Mapping[Part, Mapping[str, TensorDigest]] = field(default_factory=dict)
    """The tensors of each part by name, in their order on the rank."""
    sharded: Mapping[Part, int] = field(default_factory=dict)
    """Number of tensors in each part that are either sharded over the ranks or have no values."""
    is_ddp: bool = False
    """True if ``DistributedDataParallel`` averages the gradients."""
    syncs_buffers: bool = True
    """True if DDP copies rank 0's buffers to all ranks before each forward pass."""
    num_thawed: int = 0
    """Number of trainable parameters that were frozen when DDP wrapped the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReplica:
    """The tensors that one rank holds under several names."""

    rank: int
    held: Mapping[str, Held]
    num_steps: Mapping[str, int] = field(default_factory=dict)
    """The number of steps of each optimizer on the rank, if the optimizer counts its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """The sampler to show, and the number of epochs that each rank iterates over it."""

    expression: str = ""
    """A sampler or ``DataLoader`` on the ranks.  If empty, ddpnb makes a ``DistributedSampler``."""
    num_samples: int = option(
        30, "size of the data set if you do not name a sampler", flag="-n", least=1, most=1_000_000
    )
    num_epochs: int = option(3, "number of epochs to show", flag="--epochs", least=1, most=20)
    sets_epoch: bool = option(
        True, "do not call set_epoch(epoch) before each epoch", flag="--no-set-epoch"
    )
    drop_last: bool = option(
        False, "drop leftover samples, instead of repeating samples as padding"
    )
    shuffle: bool = option(False, "shuffle the samples, as DistributedSampler does")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """The samples that one rank gets."""

    kind: str
    num_samples: int
    """The size of the data set; 0 if unknown."""
    epochs: tuple[Indices, ...]
    has_set_epoch: bool = True
    """True if the sampler has ``set_epoch``.  Otherwise, the order of the next epoch may differ."""
