"""How does the server learn of deaths that its transport does not notice?  (Rank 0, a thread.)"""

import threading
from collections.abc import Callable, Sequence
from typing import final

from ddpnb.rank.transport.server import Server

_LOOK_SECONDS = 0.25


@final
class Lookout:
    """Looks at the processes of the other ranks, from ``start`` until ``close``.

    Args:
        server: is told whom it has lost.
        dead: returns the ranks whose processes have died.
    """

    def __init__(self, server: Server, dead: Callable[[], Sequence[int]]) -> None:
        self._server = server
        self._dead = dead
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ddpnb-lookout", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more; may be called twice, and without ``start``."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            for rank in self._dead():
                self._server.lose(rank)
