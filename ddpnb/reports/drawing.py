"""When a comparison is redrawn while it trains, and what happens if that fails (kernel)."""

import sys
import time
from collections.abc import Callable
from typing import final

import psutil

from ddpnb.protocol.errors import summary_of

REDRAW_SECONDS = 0.5
"""The shortest time between two redraws."""

MAX_SHARE = 0.1
"""The share of a core's time that redraws may take: two redraws a second cost about 7 %."""

BUSY_SHARE, BUSY_PERCENT = 0.03, 80.0
"""The share where all cores together are busier than this."""

MAX_PAUSE_SECONDS = 2.5
"""The longest pause: costly pictures, such as the first of a run, are rare."""


@final
class DrawingGuard:
    """Lets a training go on when it cannot be drawn; says so once."""

    def __init__(self) -> None:
        self._has_failed = False

    def draw(self, drawing: Callable[[], object]) -> None:
        """Draw, if that is possible."""
        try:
            drawing()
        except Exception as error:  # noqa: BLE001  the edge of the drawing: any library may fail
            if not self._has_failed:
                self._has_failed = True
                print(
                    f"This cannot be drawn: {summary_of(error)}. The training goes on, and its "
                    "numbers are stored.",
                    file=sys.stderr,
                )


@final
class RedrawThrottle:
    """Spaces redraws, so that they take a small share of this process's time.

    The share is smaller where training keeps all cores busy, because drawing slows it there.

    Args:
        now: a monotonic clock.
        spent: a clock of the processor time of the drawing thread.
        busy: returns how busy all cores have been since the last call, in percent.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
        busy: Callable[[], float] = psutil.cpu_percent,
    ) -> None:
        self._now, self._spent, self._busy = now, spent, busy
        self._next_seconds = 0.0
        busy()

    def is_due(self) -> bool:
        """Return whether the next redraw is due."""
        return self._now() >= self._next_seconds

    def draw(self, drawing: Callable[[], None]) -> None:
        """Draw, then set the pause that keeps drawing within its share."""
        began = self._spent()
        drawing()
        share = MAX_SHARE if self._busy() < BUSY_PERCENT else BUSY_SHARE
        pause = (self._spent() - began) / share
        self._next_seconds = self._now() + min(max(pause, REDRAW_SECONDS), MAX_PAUSE_SECONDS)
