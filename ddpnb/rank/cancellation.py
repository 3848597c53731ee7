"""How a rank is freed from waits that are not the process group's own, and what it raises (ranks).

Whatever waits for other ranks outside the group holds a ``CancellationToken``.  Code that waits at
a socket or a condition registers a way to end that wait.  Code that polls checks the token each
time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import final

from ddpnb.compat import torch_internals


class ConsequenceError(RuntimeError):
    """Another rank has failed or gone, or this one was freed from its wait; the cause is there."""


class RankLostError(ConsequenceError):
    """A rank left in the middle of a run, or makes no progress: the run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} left in the middle of the run, or no longer answers "
            "(slow steps need a longer timeout, as in async:timeout=120)."
        )
        self.rank = rank


class RunCancelledError(ConsequenceError):
    """This rank was not waiting; it was ended because another rank had failed."""


@final
class CancellationToken:
    """The token of one group: aborted once, with the group, from another thread than the waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self.is_aborted = False
        """Whether all waits have been ended."""

    def abort(self) -> int:
        """End all waits, present and future; return how many there were.  May be called twice."""
        with self._lock:
            self.is_aborted = True
            for end_wait in self._callbacks:
                end_wait()
            return len(self._callbacks)

    @contextlib.contextmanager
    def held(self, end_wait: Callable[[], object]) -> Iterator[None]:
        """Have ``end_wait`` called if the group is aborted inside the block.

        It is called from another thread, or at once if the group has been aborted already.
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
        """Raise ``ConsequenceError`` if the group has been aborted; called by what waits."""
        if self.is_aborted:
            raise ConsequenceError("This rank was freed from its wait.")


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception only reports that another rank has gone or failed."""
    if isinstance(error, ConsequenceError):
        return True
    text = text_of(error)
    is_lost = isinstance(error, RuntimeError) and torch_internals.reports_lost_peer(error, text)
    return is_lost or f"running the callback: {ConsequenceError.__name__}: " in text  # of a future


def text_of(error: object) -> str:
    """Return an exception as text, in Python's words where its own code for that fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the user's code
        return "<exception str() failed>"
