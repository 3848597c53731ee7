"""What ranks report of their replicas, and of the samples that each gets (kernel, ranks)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.options import check_options, option

CHUNK_ELEMENTS = 2**16
"""Elements of a tensor that have one digest, and that a rank sends together."""
DIGEST_BYTES = 16

Indices = NDArray[np.integer[Any]]
"""Samples, in the order in which they are handed out."""


class Part(StrEnum):
    """A part of what is compared; equal to its name in a table."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    STATE = "state"
    VALUES = "values"
    """Of a tensor that the user names, or of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """One tensor of one rank, without its values."""

    shape: tuple[int, ...] = ()
    kind: str = ""
    """Its element type, such as ``"float32"``."""
    digests: bytes = b""
    """``DIGEST_BYTES`` for every ``CHUNK_ELEMENTS``."""

    def chunk(self, number: int) -> bytes:
        """Return the digest of a chunk."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    @property
    def num_chunks(self) -> int:
        """How many chunks it has."""
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds under a name."""

    parts: Mapping[Part, Mapping[str, TensorDigest]] = field(default_factory=dict)
    """The tensors of each part by their names, in the order in which they are held."""
    sharded: Mapping[Part, int] = field(default_factory=dict)
    """Tensors of which each rank holds another part by design, or that have no values."""
    is_ddp: bool = False
    """Whether ``DistributedDataParallel`` averages its gradients."""
    syncs_buffers: bool = True
    """Of DDP: whether each forward pass begins with rank 0's buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReplica:
    """What one rank holds under each name."""

    rank: int
    held: Mapping[str, Held]
    num_steps: Mapping[str, int] = field(default_factory=dict)
    """Of each optimizer among the variables that has counted some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """Which epochs of which sampler a rank reads."""

    expression: str = ""
    """A sampler or a ``DataLoader`` of the user's; empty: a ``DistributedSampler`` is made."""
    num_samples: int = option(
        30, "samples of the data set for which one is made", flag="-n", least=1, most=1_000_000
    )
    num_epochs: int = option(3, "epochs to draw", flag="--epochs", least=1, most=20)
    sets_epoch: bool = option(
        True, "do not call set_epoch(epoch) before each epoch", flag="--no-set-epoch"
    )
    drop_last: bool = option(False, "leave samples out, repeat none")
    shuffle: bool = option(False, "shuffle, as DistributedSampler does it")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """The samples that one rank gets."""

    kind: str
    """The class of the sampler."""
    num_samples: int
    """Of the data set; 0 if not known."""
    epochs: tuple[Indices, ...]
    has_set_epoch: bool = True
    """Whether an epoch may be chosen; if not, what is drawn at random is one draw of many."""
