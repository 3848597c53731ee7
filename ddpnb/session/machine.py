"""The share of the available CPU cores that other programs use.  Runs in the kernel.

In a container with a quota, ddpnb measures the container's programs.  Without a quota, ddpnb
measures all programs on the CPUs on which this kernel may run.
"""

import contextlib
import time

import psutil

from ddpnb.protocol.cores import busy_seconds, quota, usable_cpus

LEAST_SHARE = 0.2
"""If other programs use at least this share of the cores, the result warns about them."""


class OtherPrograms:
    """Measures, from its creation on, the CPU time of programs except this kernel's processes."""

    def __init__(self) -> None:
        self._num_cores, self._group = quota()
        self._has_quota = busy_seconds(self._group) > 0
        self._cpus = usable_cpus()
        self._began = time.monotonic()
        self._before = self._busy_seconds() - _own_seconds()

    def share(self) -> float:
        """Return the share of the available cores that others have used, between 0 and 1."""
        used = self._busy_seconds() - _own_seconds() - self._before
        num = self._num_cores if self._has_quota else len(self._cpus)
        return min(max(used / ((time.monotonic() - self._began) * num or 1), 0.0), 1.0)

    def _busy_seconds(self) -> float:
        if self._has_quota:
            return busy_seconds(self._group)
        cpus = psutil.cpu_times(percpu=True)
        if max(self._cpus) < len(cpus):  # otherwise a container lists only its own CPUs
            cpus = [cpus[cpu] for cpu in self._cpus]
        return float(sum(sum(t[:8]) - t.idle - getattr(t, "iowait", 0.0) for t in cpus))


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
