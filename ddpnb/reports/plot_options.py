"""The user's choices about a figure and its table (kernel)."""

import math
from dataclasses import dataclass

from ddpnb.protocol.errors import UserError, one_of

ACROSS = ("samples", "seconds", "updates")
"""The quantities that a loss can be drawn against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """How a comparison is drawn."""

    x: str = ""
    """One of ``ACROSS``, or empty for samples and seconds side by side."""
    log: bool = False
    """Whether the axis of losses is logarithmic."""
    target: float | None = None
    """A training loss; the figure marks it, the table shows when it is reached."""

    def __post_init__(self) -> None:
        if self.x and self.x not in ACROSS:
            raise one_of("--x", self.x, ACROSS)
        if self.target is not None and not math.isfinite(self.target):
            raise UserError(f"--target is a training loss, e.g. 0.3, not {self.target}.")
        if self.log and self.target is not None and self.target <= 0:
            raise UserError(f"--log shows no loss of {self.target:g}: choose a --target above 0.")


EVERYTHING = PlotOptions()
"""The default choices."""
