"""Handles interrupts of the kernel while the kernel waits for ranks.  Runs in the kernel."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.protocol.errors import OneLine

OBEYED_SECONDS = 30.0
"""For this time after a recorded interrupt, ddpnb ignores further interrupts in a cell's code."""
IMPATIENCE_SECONDS = 1.0
"""For this time after an interrupted call, ddpnb ignores further interrupts in a cell's code."""

BETWEEN_STATEMENTS = InteractiveShell.run_ast_nodes.__code__
"""The method that runs the statements of a cell.  It shows an interrupt between two statements."""
ENDS = BETWEEN_STATEMENTS, InteractiveShell.showtraceback.__code__


class Interrupted(OneLine, KeyboardInterrupt):
    """ddpnb has stopped because of an interrupt."""

    def __init__(self, text: str = "ddpnb was interrupted and has stopped.") -> None:
        super().__init__(text)


Interrupted.__name__ = "KeyboardInterrupt"  # the name that Jupyter's clients know


class _SigintHandler:
    """Records interrupts while ddpnb uses the ranks; raises KeyboardInterrupt at other times.

    If every interrupt were raised at once, a message might be sent only in part, or a new rank
    might never be noted.  A second interrupt could stop IPython while IPython shows the error, and
    the client would wait forever.  So ddpnb raises a second interrupt only in a cell's code.
    """

    is_recording = False
    is_interrupted = False
    is_raised = False
    """True if the recorded interrupt has been raised."""
    raises_from = 0.0
    """From this value of ``time.monotonic()`` on, interrupts in a cell's code are raised."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_recording and not self.is_interrupted:
            self.is_interrupted = True
            self.raises_from = time.monotonic() + OBEYED_SECONDS
        elif time.monotonic() >= self.raises_from + (0 if in_cell(frame) else OBEYED_SECONDS):
            signal.default_int_handler(number, frame)


def in_cell(frame: FrameType | None) -> bool:
    """Return True if a cell runs and shows no error, or if this process does not run IPython."""
    shell = get_ipython()
    while shell is not None and frame is not None and frame.f_globals is not shell.user_ns:
        if frame.f_code in ENDS:
            return frame.f_code is BETWEEN_STATEMENTS
        frame = frame.f_back
    return frame is not None


_handler = _SigintHandler()


@contextlib.contextmanager
def noted_interrupts() -> Iterator[None]:
    """Record interrupts, and raise ``KeyboardInterrupt`` only in ``raise_if_interrupted``.

    An interrupt that has not been raised at the end of the block is raised there.  Blocks may be
    nested.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the only interrupted thread
    is_foreign = signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _handler)
    if _handler.is_recording or not is_main or is_foreign:
        yield
        return
    _handler.is_interrupted = _handler.is_raised = False
    _handler.raises_from = 0.0
    _handler.is_recording = True
    signal.signal(signal.SIGINT, _handler)  # again at each call, because ipykernel replaces it
    try:
        yield
        raise_if_interrupted()
    finally:
        _handler.is_recording = False
        _handler.raises_from = time.monotonic() + _handler.is_interrupted * IMPATIENCE_SECONDS


def raise_if_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` once for an interrupt that ``noted_interrupts`` has recorded."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _handler.is_interrupted and not _handler.is_raised and _handler.is_recording:
        _handler.is_raised = True
        raise Interrupted
