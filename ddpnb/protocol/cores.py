"""How many cores this process may use, from its affinity and its cgroups.

A container or a batch job limits its processes to some CPUs (affinity), or to a share of the CPUs'
time: ``docker run --cpus 1.5`` gives a cgroup a quota.  Every process imports this file.
"""

import math
import os
from pathlib import Path

import psutil

from ddpnb.protocol.processes import portable

ROOT = Path("/")


def usable_cpus() -> set[int]:
    """Return the logical CPUs on which this process may run."""
    return set(range(psutil.cpu_count() or 1)) if portable() else os.sched_getaffinity(0)


def num_cores(root: Path = ROOT) -> float:
    """Return the number of cores that this process may use, without hyper-threads.

    If a quota is smaller than the number of cores, the result is the quota, such as 1.5.
    """
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_read(root / siblings.format(cpu)) or str(cpu) for cpu in usable_cpus()}
    num = (psutil.cpu_count(logical=False) or 1) if portable() else len(cores)
    return min(num, quota(root)[0])


def describe_cores() -> str:
    """Return the number of cores, and the number of logical CPUs if it differs."""
    cores, cpus = num_cores(), len(usable_cpus())
    return f"{cores:g}" + (f", on {cpus} logical CPUs" if cores != cpus else "")


def quota(root: Path = ROOT) -> tuple[float, Path]:
    """Return the smallest quota, in cores, of the cgroups around this process, and its folder.

    A container may have its own cgroup at the top, although ``/proc`` has the host's longer path.
    So some of the folders may not exist.
    """
    found = [(math.inf, root)]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # version 2 has one line, without controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        top, inner = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), Path(path.strip("/"))
        for group in (top / each for each in (*reversed(inner.parents), inner)):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            words = " ".join(_read(group / name) for name in names).split()
            if len(words) == 2 and all(map(str.isdecimal, words)):  # not "max", and not -1
                found.append((int(words[0]) / int(words[1]), group))
    return min(found, key=lambda pair: pair[0])


def busy_seconds(group: Path) -> float:
    """Return the processor time of all programs in a cgroup; 0 if it is unknown."""
    account = Path(str(group).replace("/cgroup/cpu", "/cgroup/cpuacct"))
    if usage := _read(account / "cpuacct.usage"):  # version 1
        return int(usage) / 1e9
    words = _read(group / "cpu.stat").split()
    return int(words[words.index("usage_usec") + 1]) / 1e6 if "usage_usec" in words else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
