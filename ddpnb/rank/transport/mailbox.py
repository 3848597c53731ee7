"""Where do gradients and parameters lie between one worker and the server?  (Rank side.)"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from ddpnb.rank.transport.packed import Packed, create_shared, map_shared, num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """One worker's shared memory: it writes gradients, the server writes parameters.

    The two take turns, by messages: never do both touch it at a time.
    """

    gradients: Packed
    parameters: Packed

    @classmethod
    def create(cls, path: Path, like: Sequence[Tensor]) -> Self:
        """Make the file behind a mailbox for parameters like these, and map it."""
        create_shared(path, num_bytes([*like, *like]))
        return cls.map(path, like)

    @classmethod
    def map(cls, path: Path, like: Sequence[Tensor]) -> Self:
        """Map a mailbox that the server has made."""
        both = map_shared(path, [*like, *like])
        half = num_bytes(like)
        return cls(
            gradients=Packed(both.raw[:half], both.tensors[: len(like)]),
            parameters=Packed(both.raw[half:], both.tensors[len(like) :]),
        )
