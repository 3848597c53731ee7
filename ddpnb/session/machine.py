"""How much of this machine did other programs take?  (Kernel.)"""

import contextlib
import os
import time
from collections.abc import Iterable

import psutil

LEAST_SHARE = 0.2
"""Share of the cores that other programs may take before the result says so."""


class OtherPrograms:
    """The processor time that others than this kernel and the ranks use from now on.

    Args:
        ranks: the process ids of the ranks.  What these and the kernel have started is theirs.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._pids = [os.getpid(), *ranks]
        self._began = time.monotonic()
        self._before = _busy_seconds() - self._own_seconds()

    def share(self) -> float:
        """Return the share of all cores that they have used: 0 to 1."""
        used = _busy_seconds() - self._own_seconds() - self._before
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return min(max(used / cores, 0.0), 1.0) if cores > 0 else 0.0

    def _own_seconds(self) -> float:
        own, seconds = set(self._pids), 0.0
        for process in psutil.process_iter():  # by number, so that a parent comes first
            with contextlib.suppress(psutil.Error):  # it has ended
                if process.pid in own or process.ppid() in own:
                    own.add(process.pid)
                    seconds += sum(process.cpu_times()[:4])
        return seconds


def disturbance(share: float, num_ranks: int) -> str:
    """Return the sentence on other programs' share of the cores; empty where it is small."""
    if share < LEAST_SHARE:
        return ""
    return (
        f"Other programs took {share:.0%} of this machine's cores while it trained, so the times "
        f"are not to be trusted: end them, or add --devices {num_ranks}, which is hardly disturbed."
    )


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0))
