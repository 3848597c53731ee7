"""Interrupts of the kernel while it waits for ranks (kernel)."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from IPython.core.getipython import get_ipython

OBEYED_SECONDS = 30.0
"""If a noted interrupt has no effect for this time, the next interrupt is raised anywhere."""
IMPATIENCE_SECONDS = 1.0
"""Time after an interrupted call during which further interrupts are ignored."""


class _SigintHandler:
    """Notes an interrupt during a supervised call.  Otherwise, raises the interrupt.

    An interrupt that is raised at any point could cut a message in half.  A second interrupt could
    hit IPython while it shows the error, or ipykernel while it replies.  The client would then
    wait forever, so a second interrupt is raised only in a cell's code.
    """

    is_supervising = False
    is_interrupted = False
    raises_from = 0.0
    """Time by ``time.monotonic()`` from which interrupts are raised."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_supervising and not self.is_interrupted:
            self.is_interrupted = True
            self.raises_from = time.monotonic() + OBEYED_SECONDS
        elif time.monotonic() >= self.raises_from + (0 if in_cell(frame) else OBEYED_SECONDS):
            signal.default_int_handler(number, frame)


def in_cell(frame: FrameType | None) -> bool:
    """Return True if a cell's code called the frame; always True outside of IPython."""
    shell = get_ipython()
    while shell is not None and frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back
    return frame is not None


_handler = _SigintHandler()


@contextlib.contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Note interrupts instead of raising them; yield a function: has one been noted?

    ipykernel sets its own handler at each cell.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the only interrupted thread
    if not is_main or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _handler):
        yield lambda: False
        return
    _handler.is_interrupted, _handler.raises_from = False, 0.0
    _handler.is_supervising = True
    signal.signal(signal.SIGINT, _handler)
    try:
        yield lambda: _handler.is_interrupted
    finally:
        _handler.is_supervising = False
        _handler.raises_from = time.monotonic() + _handler.is_interrupted * IMPATIENCE_SECONDS
