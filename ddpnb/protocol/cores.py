"""How many cores this process may use, from its affinity and its cgroups.

A container or a batch job limits its processes to some CPUs (affinity) or to a share of the CPUs'
time (the quota of a cgroup).  ``docker run --cpus 1.5`` sets a quota.  Every process imports this
file.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddpnb.protocol.processes import portable

ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A cgroup that contains this process."""

    folder: Path
    account: Path
    """The folder of the cgroup that measures processor time."""

    @property
    def num_cores(self) -> float:
        """The quota, in cores; infinite if the cgroup has no quota."""
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):  # no such file, or no quota ("max")
                quota, period = map(int, " ".join(map(self._read, names)).split())
                return quota / period if quota > 0 else math.inf
        return math.inf

    @property
    def busy_seconds(self) -> float:
        """The processor time of all programs in the cgroup; 0 if it is unknown."""
        with contextlib.suppress(OSError):
            return int((self.account / "cpuacct.usage").read_text()) / 1e9
        with contextlib.suppress(OSError, KeyError):
            lines = self._read("cpu.stat").splitlines()
            return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6
        return 0.0

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()


def usable_cpus() -> set[int]:
    """Return the logical CPUs on which this process may run."""
    return set(range(psutil.cpu_count() or 1)) if portable() else os.sched_getaffinity(0)


def num_cores(root: Path = ROOT) -> float:
    """Return the number of cores that this process may use, without hyper-threads.

    The number is a fraction if a quota is a fraction.
    """
    return min(_num_physical(root), quota(root).num_cores)


def describe_cores(root: Path = ROOT) -> str:
    """Return the number of cores, then the number of hyper-threads or the word quota."""
    cores, threads = num_cores(root), len(usable_cpus())
    if cores < _num_physical(root):
        return f"{cores:g}, a quota"
    return f"{cores:g}" + (f", with {threads} hyper-threads" if threads != cores else "")


def quota(root: Path = ROOT) -> Group:
    """Return the cgroup with the smallest quota of all cgroups that contain this process."""
    groups = _groups(root)
    return min(groups, key=lambda group: group.num_cores, default=Group(folder=root, account=root))


def _num_physical(root: Path) -> int:
    if portable():
        return psutil.cpu_count(logical=False) or 1
    cores = set()
    for cpu in usable_cpus():
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:  # unknown topology
            cores.add(str(cpu))
    return len(cores)


def _groups(root: Path) -> Iterator[Group]:
    """Yield the cgroups of versions 1 and 2 around this process, outermost first.

    A container may have its own cgroup at the top, although ``/proc`` has the host's longer path.
    So some of the folders may not exist.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            inner = Path(path.strip("/"))
            for each in (*reversed(inner.parents), inner):
                account = root / "sys/fs/cgroup/cpuacct" if controllers else top
                yield Group(folder=top / each, account=account / each)
