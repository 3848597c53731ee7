"""Cores are counted in containers: from affinity, and from quotas of nested cgroups."""

import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.placement import ClusterSpec, Host, place_ranks
from ddpnb.protocol.cores import busy_seconds, num_cores, quota
from ddpnb.session.machine import LEAST_SHARE, OtherPrograms, disturbance

CPUS = os.sched_getaffinity(0)


def test_hyper_threads_of_one_core_count_once(tmp_path: Path):
    assert num_cores(tmp_path) == len(CPUS)
    for cpu in CPUS:
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-63\n")
    assert num_cores(tmp_path) == 1


def write(folder: Path, version: int, cores: float | None, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        text = "max 100000\n" if cores is None else f"{round(cores * 1e5)} 100000\n"
        (folder / "cpu.max").write_text(text)
        (folder / "cpu.stat").write_text(f"usage_usec {round(seconds * 1e6)}\nuser_usec 0\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{-1 if cores is None else round(cores * 5e4)}\n")
        (folder / "cpu.cfs_period_us").write_text("50000\n")
        (folder / "cpuacct.usage").write_text(f"{round(seconds * 1e9)}\n")


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_quota_of_all_groups_counts(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    version, is_hidden = draw.choice((1, 2)), draw.random() < 0.3
    names = [draw.choice(("system.slice", "user@7", "pod b")) + str(n) for n in range(seed % 5)]
    quotas = [draw.choice((None, 0.5, 1.5, draw.uniform(0.01, 99))) for _ in range(len(names) + 1)]
    top = tmp_path / "sys/fs/cgroup" / ("cpu,cpuacct" if version == 1 else "")
    shown = quotas[-1:] if is_hidden else quotas  # a container may see only its own group
    for depth, cores in enumerate(shown):
        write(top.joinpath(*names[:depth]), version, cores, seconds=depth + 1)
    if version == 1:
        for name in ("cpu", "cpuacct"):
            (top.parent / name).symlink_to(top.name)
    controllers = "cpu,cpuacct" if version == 1 else ""
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    lines = [f"5:memory:/{names}", f"4:{controllers}:/{'/'.join(names)}"]
    own.write_text("\n".join(draw.sample(lines, 2)) + "\n")
    known = [math.inf if cores is None else cores for cores in shown]
    assert num_cores(tmp_path) == pytest.approx(min(*known, len(CPUS)), abs=1e-4)
    if min(known) < math.inf:
        assert busy_seconds(quota(tmp_path)[1]) == known.index(min(known)) + 1
    plan = place_ranks(ClusterSpec(), [Host(num_cores=num_cores(tmp_path))])
    assert plan.num_ranks >= 2
    assert plan.num_threads * plan.num_ranks <= max(min(known), plan.num_ranks)


@pytest.mark.parametrize("text", ["", "0::/../..\n", "4:cpu:/a/b\n", "0::/a\n1:name=systemd:/b\n"])
def test_without_readable_groups_there_is_no_quota(tmp_path: Path, text: str):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("nonsense\n")
    assert num_cores(tmp_path) == len(CPUS)
    assert busy_seconds(quota(tmp_path)[1]) == 0


# -- a real cgroup -------------------------------------------------------------------------

GROUPS = Path("/sys/fs/cgroup")
SPIN = "import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
MEASURE = """
import time
from ddpnb.protocol.cores import num_cores
from ddpnb.session.machine import OtherPrograms
load = OtherPrograms()
time.sleep(1.5)
print(num_cores(), load.share())
"""


@pytest.fixture
def joins() -> Iterator[str]:
    """A cgroup of half a core, as a shell command that joins the cgroup."""
    made, name = [], f"ddpnb-test-{os.getpid()}"
    try:
        if (GROUPS / "cpu").is_dir():
            made = [GROUPS / each / name for each in ("cpu", "cpuacct")]
            values = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
        else:
            made, values = [GROUPS / name], {"cpu.max": "50000 100000"}
        for folder in made:
            folder.mkdir(exist_ok=True)
        for file, value in values.items():
            (made[0] / file).write_text(value)
    except OSError as error:
        pytest.skip(f"this machine lets us create no cgroup: {error}")
    try:
        yield "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in made)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.mark.parametrize("is_inside", [False, True])
def test_other_programs_are_measured_inside_a_container(joins: str, is_inside: bool):
    spin = f"exec {sys.executable} -c '{SPIN.format(seconds=60)}'"
    measure = f"{joins}; exec {sys.executable} -c '{MEASURE}'"
    with subprocess.Popen(["sh", "-c", f"{joins}; {spin}" if is_inside else spin]) as other:
        time.sleep(0.3)
        done = subprocess.run(["sh", "-c", measure], capture_output=True, text=True, check=True)
        other.kill()
    cores, share = map(float, done.stdout.split())
    assert cores == 0.5
    assert (share >= LEAST_SHARE) is is_inside


@pytest.mark.parametrize("is_own", [False, True])
def test_a_busy_process_counts_unless_the_kernel_has_started_it(is_own: bool):
    spin = f"{sys.executable} -c '{SPIN.format(seconds=2.5)}'"
    command = f"{spin} >/dev/null & echo $!; {'wait' if is_own else ''}"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True) as shell:
        busy = psutil.Process(int(shell.stdout.readline()))
        if not is_own:  # the process is then no descendant of this one
            shell.wait()
        began, load = time.monotonic(), OtherPrograms()
        before, idle = sum(busy.cpu_times()[:2]), psutil.cpu_times().idle
        time.sleep(1.0)
        used, idle = sum(busy.cpu_times()[:2]) - before, psutil.cpu_times().idle - idle
        share = load.share()
        seconds = (time.monotonic() - began) * psutil.cpu_count()  # on a busy machine over 1 s each
    assert used > 0
    if is_own:
        assert share <= 1 - (idle + used) / seconds + 0.1
    else:
        assert share >= used / seconds - 0.1


def test_little_is_not_said():
    assert disturbance(LEAST_SHARE - 0.01, 2) == ""
    assert "45%" in disturbance(0.45, 2)
    assert "--devices 2" in disturbance(0.45, 2)
