"""How much of this machine did other programs take?  (Kernel.)"""

import contextlib
import os
import time

import psutil

LEAST_SHARE = 0.2
"""Share of the cores that other programs may take before the result says so."""


class OtherPrograms:
    """The processor time that others than this kernel and its processes use from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _busy_seconds() - _own_seconds()

    def share(self) -> float:
        """Return the share of all cores that they have used: 0 to 1."""
        used = _busy_seconds() - _own_seconds() - self._before
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return min(max(used / cores, 0.0), 1.0) if cores > 0 else 0.0


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


def _own_seconds() -> float:
    kernel, seconds = psutil.Process(), 0.0
    for process in (kernel, *kernel.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            seconds += sum(process.cpu_times()[:4])
    return seconds
