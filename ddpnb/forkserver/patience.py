"""Imports modules only while no other program needs the core.  Runs in the fork server.

A process that lowers its priority cannot raise it again without privileges, and its ranks would
inherit the low priority.  So the fork server keeps its priority, and pauses between two imports.
"""

import contextlib
import importlib.abc
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

PAUSE = 10.0
"""Seconds of pause for each second that the fork server has waited for a core."""
MAX_PAUSE_SECONDS = 2.0
LOOK_SECONDS = 0.003
"""Minimum time between two looks at the waiting time."""


@contextlib.contextmanager
def patient_imports(kernel: Connection) -> Iterator[None]:
    """Pause imports while other programs need the core, until the kernel sends a request."""
    pauses = PausingFinder(kernel)
    sys.meta_path.insert(0, pauses)
    try:
        yield
    finally:
        sys.meta_path.remove(pauses)


class PausingFinder(importlib.abc.MetaPathFinder):
    """Finds no module, but pauses when Python looks for a module."""

    def __init__(self, kernel: Connection) -> None:
        self.kernel = kernel
        self.waited = seconds_waited()
        self.looks_from = 0.0

    def find_spec(self, *_: object) -> None:
        """Pause if the fork server has waited for a core.  A request ends the pause at once."""
        if time.monotonic() < self.looks_from or self.kernel.closed:  # closed in a forked child
            return
        late = seconds_waited() - self.waited
        self.kernel.poll(min(PAUSE * late, MAX_PAUSE_SECONDS))
        self.waited = seconds_waited()
        self.looks_from = time.monotonic() + LOOK_SECONDS


def seconds_waited() -> float:
    """Return how long this thread was ready to run without a core; 0 if the system cannot say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
