"""The share of this machine's CPU cores that other programs use.  Runs in the kernel."""

import contextlib
import os
import time

import psutil

LEAST_SHARE = 0.2
"""If other programs use at least this share of the cores, the result warns about them."""


class OtherPrograms:
    """Measures, from its creation on, the CPU time of programs except this kernel's processes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _busy_seconds() - _own_seconds()

    def share(self) -> float:
        """Return the share of all cores that other programs have used, between 0 and 1."""
        used = _busy_seconds() - _own_seconds() - self._before
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return min(max(used / cores, 0.0), 1.0) if cores > 0 else 0.0


def disturbance(share: float, num_ranks: int) -> str:
    """Return a warning if other programs used a large share of the cores, else an empty string."""
    if share < LEAST_SHARE:
        return ""
    return (
        f"Other programs took {share:.0%} of this machine's cores during training, so the times "
        f"are unreliable. End those programs, or add --devices {num_ranks} to emulate devices."
    )


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0))


def _own_seconds() -> float:
    kernel, seconds = psutil.Process(), 0.0
    for process in (kernel, *kernel.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended
            seconds += sum(process.cpu_times()[:4])
    return seconds
