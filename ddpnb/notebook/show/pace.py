"""When may the display be drawn anew?  (Notebook side.)"""

import time
from collections.abc import Callable
from typing import final

import psutil

REDRAW_SECONDS = 0.3
"""Between two redraws at least."""

MAX_SHARE = 0.05
"""The share of this process's time that drawing may take."""

BUSY_SHARE = 0.01
"""The same while training keeps all cores busy: what is drawn then is taken from it."""

FREE_CORES = 0.5
"""As many must be idle for drawing to be at nobody's cost."""

LOOK_SECONDS = 1.0
"""Over how long it is counted how many are."""

CREDIT_SECONDS = 0.05
"""Drawing that may be done at once, before its share counts."""

DEBT_SECONDS = 0.03
"""As much is made up for at most: a dear picture, as the first of a run, is rare."""


def idle_seconds() -> float:
    """Return for how long this machine's cores have been idle, added up."""
    idle: float = psutil.cpu_times().idle
    return idle


@final
class Pace:
    """Gives drawing its share of the time; what it has saved up, it may spend at once.

    Args:
        now: a clock.
        spent: a clock of what the drawing thread computes.
        idle: a clock that runs by as many seconds a second as cores are idle.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
        idle: Callable[[], float] = idle_seconds,
    ) -> None:
        self._now = now
        self._spent = spent
        self._idle = idle
        self._credit = CREDIT_SECONDS
        self._counted = self._looked = now()
        self._looked_idle = idle()
        self._share = BUSY_SHARE
        self._last = self._counted - REDRAW_SECONDS

    def is_due(self) -> bool:
        """Return whether it is time to draw."""
        now = self._now()
        if now - self._last < REDRAW_SECONDS:
            return False
        self._gain(now)
        return self._credit > 0

    def draw(self, drawing: Callable[[], None]) -> None:
        """Draw, and count what it costs."""
        began = self._spent()
        drawing()
        self._credit = max(self._credit - (self._spent() - began), -DEBT_SECONDS)
        self._last = self._counted = self._now()

    def _gain(self, now: float) -> None:
        """Add what drawing may take of the time that has passed."""
        if (passed := now - self._looked) >= LOOK_SECONDS:
            idle = self._idle()
            is_free = idle - self._looked_idle >= FREE_CORES * passed
            self._share = MAX_SHARE if is_free else BUSY_SHARE
            self._looked, self._looked_idle = now, idle
        self._credit = min(self._credit + self._share * (now - self._counted), CREDIT_SECONDS)
        self._counted = now
