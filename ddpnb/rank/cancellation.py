"""Releases a rank from waits outside the process group, with the errors that it raises (ranks).

Code that waits for other ranks outside the group holds a ``CancellationToken``.  Code that waits at
a socket or a condition registers a way to end that wait.  Code that polls checks the token each
time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import final

from ddpnb.compat import torch_internals


class ConsequenceError(RuntimeError):
    """An error that has its cause on another rank, which failed or ended."""


class RankLostError(ConsequenceError):
    """A rank ended during a run, or makes no progress.  The run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} ended during the run, or no longer answers. "
            "If its steps are slow, set a longer timeout, such as async:timeout=120."
        )
        self.rank = rank


class RunCancelledError(ConsequenceError):
    """This rank was not waiting.  ddpnb ended its run because another rank had failed."""


@final
class CancellationToken:
    """The token of one group.  ``Group.abort`` aborts it from a thread that does not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self.is_aborted = False
        """True once all waits have been ended."""

    def abort(self) -> int:
        """End all present and future waits; return how many were present.  May be called twice."""
        with self._lock:
            self.is_aborted = True
            for end_wait in self._callbacks:
                end_wait()
            return len(self._callbacks)

    @contextlib.contextmanager
    def held(self, end_wait: Callable[[], object]) -> Iterator[None]:
        """Call ``end_wait`` if the group is aborted inside the block.

        The call comes from another thread, or at once if the group is already aborted.
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
    """Return an exception as text, or Python's placeholder if its ``__str__`` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the user's code
        return "<exception str() failed>"
