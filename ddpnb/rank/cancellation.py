"""How a rank is freed from waits that are not the process group's (ranks).

Code that waits for other ranks at a socket or a condition registers a way to end that wait.  Code
that polls checks the token each time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import final


class RunCancelledError(RuntimeError):
    """This rank was not waiting; it was ended because another rank had failed."""


@final
class CancellationToken:
    """The token of one group: aborted once, with the group, from another thread than the waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_aborted = False

    @property
    def is_aborted(self) -> bool:
        """Whether all waits have been ended."""
        return self._is_aborted

    def abort(self) -> int:
        """End all waits, present and future; return how many there were.  May be called twice."""
        with self._lock:
            self._is_aborted = True
            for end_wait in self._callbacks:
                end_wait()
            return len(self._callbacks)

    @contextlib.contextmanager
    def held(self, end_wait: Callable[[], None]) -> Iterator[None]:
        """Have ``end_wait`` called if the group is aborted inside the block.

        Args:
            end_wait: ends a wait; called from another thread, or at once if the group has been
                aborted already.
        """
        with self._lock:
            self._callbacks.append(end_wait)
            if self._is_aborted:
                end_wait()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(end_wait)

    def check(self, *, is_waiting: bool = True) -> None:
        """Raise if the group has been aborted.

        Args:
            is_waiting: whether the caller is waiting for other ranks.

        Raises:
            RunCancelledError: the group has been aborted, and the caller was not waiting.
            RuntimeError: the group has been aborted, and the caller was waiting.
        """
        if self._is_aborted and not is_waiting:
            raise RunCancelledError("This rank was ended with the others.")
        if self._is_aborted:
            raise RuntimeError("Connection closed by peer: this rank was freed from its wait.")
