"""Handles interrupts of the kernel while the kernel waits for ranks.  Runs in the kernel."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from IPython.core.getipython import get_ipython

OBEYED_SECONDS = 30.0
"""For this time after a recorded interrupt, ddpnb ignores further interrupts in a cell's code."""
IMPATIENCE_SECONDS = 1.0
"""For this time after an interrupted call, ddpnb ignores further interrupts in a cell's code."""


class _SigintHandler:
    """Records interrupts during a supervised call; raises KeyboardInterrupt at other times.

    If every interrupt were raised at once, a message might be sent only in part.  A second
    interrupt could stop IPython while IPython shows the error, and the client would wait forever.
    For this reason, ddpnb raises a second interrupt only in a cell's code.
    """

    is_supervising = False
    is_interrupted = False
    raises_from = 0.0
    """From this value of ``time.monotonic()`` on, interrupts in a cell's code are raised."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_supervising and not self.is_interrupted:
            self.is_interrupted = True
            self.raises_from = time.monotonic() + OBEYED_SECONDS
        elif time.monotonic() >= self.raises_from + (0 if in_cell(frame) else OBEYED_SECONDS):
            signal.default_int_handler(number, frame)


def in_cell(frame: FrameType | None) -> bool:
    """Return True if a cell's code called the frame, or if this process does not run IPython."""
    shell = get_ipython()
    while shell is not None and frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back
    return frame is not None


_handler = _SigintHandler()


@contextlib.contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Record interrupts instead of raising ``KeyboardInterrupt``.

    Yields a function that returns True if an interrupt has been recorded.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the only interrupted thread
    if not is_main or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _handler):
        yield lambda: False
        return
    _handler.is_interrupted, _handler.raises_from = False, 0.0
    _handler.is_supervising = True
    signal.signal(signal.SIGINT, _handler)  # again at each call, because ipykernel replaces it
    try:
        yield lambda: _handler.is_interrupted
    finally:
        _handler.is_supervising = False
        _handler.raises_from = time.monotonic() + _handler.is_interrupted * IMPATIENCE_SECONDS
