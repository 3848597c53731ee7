"""Imports modules while no other program needs the core.  Runs in the fork server.

A process that lowers its priority cannot raise it again without privileges, and its ranks would
inherit the low priority.  So the fork server keeps its priority, and pauses between two imports.
"""

import contextlib
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAUSE = 10.0
"""Seconds of pause for each second that the fork server has waited for a core."""
MAX_IMPORT_PAUSE_SECONDS = 2.0


@contextlib.contextmanager
def patient_imports(kernel: Connection) -> Iterator[None]:
    """Pause imports while other programs need the core, until the kernel sends a request."""
    before = seconds_waited()

    def pause(*_: object) -> None:
        nonlocal before
        if (late := seconds_waited() - before) and not kernel.closed:  # closed in a forked child
            kernel.poll(min(PAUSE * late, MAX_IMPORT_PAUSE_SECONDS))
            before = seconds_waited()

    finder: Any = SimpleNamespace(find_spec=pause)  # Python calls it before each import
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)


def seconds_waited() -> float:
    """Return how long this thread was ready to run without a core; 0 if the system cannot say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
