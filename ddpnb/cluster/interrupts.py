"""Interrupts of the kernel while it waits for ranks (kernel)."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from IPython.core.getipython import get_ipython

OBEYED_SECONDS = 30.0
"""If a noted interrupt has had no effect for so long, the next one is raised at once, anywhere."""
IMPATIENCE_SECONDS = 1.0
"""How long further interrupts are ignored once an interrupted call has ended."""


class _SigintHandler:
    """Notes an interrupt for the call that is supervised; raises it where none is, or none obeys.

    An interrupt that is raised wherever the kernel happens to be could end a message halfway.  A
    second one, sent in impatience, could hit IPython while it shows the error, or ipykernel while
    it replies, and the client would wait without end: it is raised in a cell's code only.
    """

    is_supervising = False
    is_interrupted = False
    raises_from = 0.0
    """In ``time.monotonic()``."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_supervising and not self.is_interrupted:
            self.is_interrupted = True
            self.raises_from = time.monotonic() + OBEYED_SECONDS
        elif time.monotonic() >= self.raises_from + (0 if in_cell(frame) else OBEYED_SECONDS):
            signal.default_int_handler(number, frame)


def in_cell(frame: FrameType | None) -> bool:
    """Return whether a cell's code has led to a frame; outside of IPython every frame counts."""
    shell = get_ipython()
    while shell is not None and frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back
    return frame is not None


_handler = _SigintHandler()


@contextlib.contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Note interrupts in place of raising them; yield whether there was one.

    Ipykernel sets its own handler at each cell.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others get no interrupts
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
