"""When may the display be drawn anew?  (Notebook side.)"""

import time
from collections.abc import Callable
from typing import final

REDRAW_SECONDS = 0.3
"""Between two redraws at least."""

MAX_SHARE = 0.05
"""The share of this process's time that drawing may take."""

CREDIT_SECONDS = 0.3
"""Drawing that may be done at once, before its share counts: the first curves cost most."""


@final
class Pace:
    """Gives drawing its share of the time; what it has saved up, it may spend at once.

    Args:
        now: a clock.
        spent: a clock of what the drawing thread computes.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._now = now
        self._spent = spent
        self._credit = CREDIT_SECONDS
        self._counted = now()
        self._last = self._counted - REDRAW_SECONDS

    def is_due(self) -> bool:
        """Return whether it is time to draw."""
        now = self._now()
        self._credit = min(self._credit + MAX_SHARE * (now - self._counted), CREDIT_SECONDS)
        self._counted = now
        return self._credit > 0 and now - self._last >= REDRAW_SECONDS

    def draw(self, drawing: Callable[[], None]) -> None:
        """Draw, and count what it costs."""
        self._last, began = self._now(), self._spent()
        drawing()
        self._credit -= self._spent() - began
