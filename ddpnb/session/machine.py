"""The share of the available CPU cores that other programs use.  Runs in the kernel.

In a container with a quota, ddpnb measures the container's programs.  Without a quota, ddpnb
measures all programs on the CPUs on which this kernel may run.
"""

import contextlib
import math
import time

import psutil

from ddpnb.protocol.cores import quota, usable_cpus

LEAST_SHARE = 0.2
"""If other programs use at least this share of the cores, the result warns about them."""


class OtherPrograms:
    """Measures, from its creation on, the CPU time of programs except this kernel's processes."""

    def __init__(self) -> None:
        self._quota, self._cpus = quota(), usable_cpus()
        self._has_account = math.isfinite(self._quota.num_cores) and self._quota.busy_seconds > 0
        self._began = time.monotonic()
        self._before = self._busy_seconds() - _own_seconds()

    def share(self) -> float:
        """Return the share of the available cores that others have used, between 0 and 1."""
        used = self._busy_seconds() - _own_seconds() - self._before
        num = self._quota.num_cores if self._has_account else len(self._cpus)
        cores = (time.monotonic() - self._began) * num
        return min(max(used / cores, 0.0), 1.0) if cores > 0 else 0.0

    def _busy_seconds(self) -> float:
        if self._has_account:
            return self._quota.busy_seconds
        every = psutil.cpu_times(percpu=True)
        are_numbered = max(self._cpus) < len(every)  # a container may list only its own CPUs
        chosen = [every[cpu] for cpu in self._cpus] if are_numbered else every
        return float(sum(sum(t[:8]) - t.idle - getattr(t, "iowait", 0.0) for t in chosen))


def disturbance(share: float, num_ranks: int) -> str:
    """Return a warning if other programs used a large share of the cores, else an empty string."""
    if share < LEAST_SHARE:
        return ""
    return (
        f"Other programs took {share:.0%} of the available cores during training, so the times "
        f"are unreliable. End those programs, or add --devices {num_ranks} to emulate devices."
    )


def _own_seconds() -> float:
    kernel, seconds = psutil.Process(), 0.0
    for process in (kernel, *kernel.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended
            seconds += sum(process.cpu_times()[:4])
    return seconds
