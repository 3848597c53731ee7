"""Has all that child processes of a cell printed been read?  (Rank side.)"""

import fcntl
import os
import resource
import stat
import sys
import termios
import time

DRAIN_SECONDS = 0.2
"""How long a cell's end may wait for the output of its child processes."""
SETTLE_SECONDS = 0.003


def wait_for_children_output(had_children: bool) -> None:
    """Wait, not for long, until what child processes wrote to stdout and stderr has been read.

    ipykernel reads it from a pipe, in a thread of its own; what it reads after the cell
    has ended belongs to no cell.
    """
    deadline = time.monotonic() + DRAIN_SECONDS
    while any(map(num_unread, (1, 2))) and time.monotonic() < deadline:
        had_children = True
        time.sleep(SETTLE_SECONDS)
    if had_children:
        time.sleep(SETTLE_SECONDS)  # the thread may have read it and not yet handed it on


def children_page_faults() -> int:
    """Return a number that grows with each child process that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def num_unread(descriptor: int) -> int:
    """Return how many bytes wait in a pipe; 0 where the descriptor is none."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(answer, sys.byteorder)
