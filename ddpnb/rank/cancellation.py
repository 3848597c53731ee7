"""How is a rank freed from a wait that is not the process group's?  (Rank side.)

What waits for other ranks by a socket or a condition of its own says here how that wait is
ended; what looks again and again asks whether it still may.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import final


class RunCancelledError(RuntimeError):
    """This rank waited for nobody, and was ended because another had failed."""


@final
class CancellationToken:
    """One group's: cut once, with the group, from another thread than the one that waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways_out: list[Callable[[], None]] = []
        self._is_cancelled = False

    @property
    def is_aborted(self) -> bool:
        """Whether nobody should wait any more."""
        return self._is_cancelled

    def abort(self) -> int:
        """End all waits, now and from now on; return how many were held.  May be called twice."""
        with self._lock:
            self._is_cancelled = True
            for let_go in self._ways_out:
                let_go()
            return len(self._ways_out)

    @contextlib.contextmanager
    def held(self, let_go: Callable[[], None]) -> Iterator[None]:
        """Have ``let_go`` called at a cut, never after this has ended.

        Args:
            let_go: ends a wait; called from another thread, at once where all is cut already.
        """
        with self._lock:
            self._ways_out.append(let_go)
            if self._is_cancelled:
                let_go()
        try:
            yield
        finally:
            with self._lock:
                self._ways_out.remove(let_go)

    def check(self, *, is_waiting: bool = True) -> None:
        """Raise where nobody should wait any more.

        Args:
            is_waiting: whether who asks is in a wait.

        Raises:
            EndedWithOthersError: all has been cut, outside a wait.
            RuntimeError: all has been cut, in one.
        """
        if self._is_cancelled and not is_waiting:
            raise RunCancelledError("This rank was ended with the others.")
        if self._is_cancelled:
            raise RuntimeError("Connection closed by peer: this rank was freed from its wait.")
