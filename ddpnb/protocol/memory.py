"""What a rank holds in memory while it trains.  (Every process.)"""

from typing import NamedTuple


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
