"""The interface to a clock that divides a step's time into parts (every rank)."""

from abc import ABC, abstractmethod
from typing import Any, Literal, final

Part = Literal["data", "forward", "backward", "communication", "optimizer", "waiting"]
"""What a step's time can be spent on; the fields of ``messages.Parts`` that exclude each other."""

Moment = Any
"""A point in time on the device's own clock, from ``Timer.moment``."""


class Timer(ABC):
    """Divides the time of a step into parts, on the device's own clock."""

    @abstractmethod
    def begin(self, part: Part, at: Moment = None) -> Part:
        """Count the time from now on, or from a recent moment, as ``part``.

        Returns:
            The part that time was counted as before.
        """

    @abstractmethod
    def moment(self, seconds_ago: float = 0.0) -> Moment:
        """Return this point in time, or on a CPU an earlier one, without waiting for the device."""

    @abstractmethod
    def hide(self, begun: Moment, ended: Moment) -> None:
        """Count communication between two moments as hidden behind other work."""


@final
class NullTimer(Timer):
    """A timer that counts nothing."""

    def begin(self, part: Part, at: Moment = None) -> Part:
        """Count nothing."""
        return part

    def moment(self, seconds_ago: float = 0.0) -> Moment:
        """Return nothing."""

    def hide(self, begun: Moment, ended: Moment) -> None:
        """Count nothing."""
