"""Ends a rank's waits outside the process group, and defines the errors of these waits.

Code that waits for other ranks outside the process group uses a ``CancellationToken``.  If the code
waits for a socket or a condition, it registers a callback that ends the wait.  If the code polls,
it checks the token in each iteration.  Runs on the ranks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import final

from ddpnb.compat import torch_internals

MAX_ERROR_CHARACTERS = 20_000
"""Maximum length of an exception's message, and of each entry of its traceback."""


class ConsequenceError(RuntimeError):
    """An error that occurred only because another rank failed or ended."""


class RankLostError(ConsequenceError):
    """Raised if a run cannot continue because another rank has ended or makes no progress."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} ended during the run, or no longer answers. "
            "If the rank's steps are only slow, set a longer timeout, such as async:timeout=120."
        )
        self.rank = rank


class RunCancelledError(ConsequenceError):
    """Raised after another rank has failed, to end the run on a rank that is not waiting."""


@final
class CancellationToken:
    """Ends a rank's waits for other ranks.  ``Group.abort`` calls ``abort`` from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self.is_aborted = False
        """True once ``abort`` has been called."""

    def abort(self) -> int:  # may be called twice
        """End all current and future waits; return how many waits were in progress."""
        with self._lock:
            self.is_aborted = True
            for end_wait in self._callbacks:
                end_wait()
            return len(self._callbacks)

    @contextlib.contextmanager
    def held(self, end_wait: Callable[[], object]) -> Iterator[None]:
        """Call ``end_wait`` if the group is aborted while the block runs.

        If the group has already been aborted, call ``end_wait`` when the block begins.
        """
        with self._lock:
            self._callbacks.append(end_wait)
            if self.is_aborted:
                end_wait()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(end_wait)

    def check(self) -> None:
        """Raise ``ConsequenceError`` if the group has been aborted."""
        if self.is_aborted:
            raise ConsequenceError("This rank was released from its wait.")


def is_consequence(error: BaseException) -> bool:
    """Return True if an exception only reports that another rank has ended or failed."""
    if isinstance(error, ConsequenceError):
        return True
    text = text_of(error)
    is_lost = isinstance(error, RuntimeError) and torch_internals.reports_lost_peer(error, text)
    return is_lost or f"running the callback: {ConsequenceError.__name__}: " in text  # of a future


def text_of(error: object) -> str:
    """Return an exception's message, or a placeholder if its ``__str__`` method raises an error."""
    try:
        return sendable(str(error))
    except BaseException as problem:  # noqa: BLE001  the user's ``__str__``
        return f"(its text could not be made: {type(problem).__name__})"


def sendable(text: str) -> str:
    """Return the beginning of a text, with escapes instead of characters that UTF-8 lacks."""
    text = str.encode(text, errors="backslashreplace").decode()  # of a subclass, too
    more = f" ... ({len(text) - MAX_ERROR_CHARACTERS:,} more characters)"
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + more
