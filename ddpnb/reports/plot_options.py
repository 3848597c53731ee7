"""What of a comparison does the user want to see?  (Notebook side.)"""

import math
from dataclasses import dataclass

from ddpnb.protocol.errors import UserError, one_of

ACROSS = ("samples", "seconds", "updates")
"""What a loss can be drawn against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """The choices about a figure and its table."""

    x: str = ""
    """One of ``ACROSS``; empty: samples and seconds side by side."""
    log: bool = False
    """Whether losses stand on a logarithmic axis."""
    target: float | None = None
    """A training loss whose reaching is marked and timed."""

    def __post_init__(self) -> None:
        if self.x and self.x not in ACROSS:
            raise one_of("--x", self.x, ACROSS)
        if self.target is not None and not math.isfinite(self.target):
            raise UserError(f"--target is a training loss, e.g. 0.3, not {self.target}.")
        if self.log and self.target is not None and self.target <= 0:
            raise UserError(f"--log shows no loss of {self.target:g}: choose a --target above 0.")


EVERYTHING = PlotOptions()
"""What is shown unless the user asks for something else."""
