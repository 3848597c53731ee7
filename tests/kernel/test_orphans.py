"""However a kernel ends, so does its cluster: no process and no file of it is left."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.rig import wait_until, wait_until_gone
from tests.kernel.client import Kernel

START = """%load_ext ddpnb
%ddp_start -n 2 --device cpu
"""
CHILD = "%%ddp\nimport subprocess\nchild = subprocess.Popen(['sleep', '1000'])"
WAITING = """%%ddp --no-wait
import time, torch.distributed as dist
dist.barrier() if rank else time.sleep(1000)
"""
DESCRIBE = """
import json, psutil
from ddpnb.session.session import this_session
cluster = this_session()._cluster
pids = [child.pid for child in psutil.Process().children(recursive=True)]
print(json.dumps([str(cluster.folder), cluster.processes.server.pid, pids]))
"""


def kill(kernel: Kernel, server: int) -> None:
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)


def kill_fork_server_first(kernel: Kernel, server: int) -> None:
    os.kill(server, signal.SIGKILL)
    kill(kernel, server)


def stop_a_rank_then_kill(kernel: Kernel, server: int) -> None:
    rank = max(psutil.Process(server).children(), key=lambda child: child.pid)
    rank.suspend()
    kill(kernel, server)


def shut_down(kernel: Kernel, server: int) -> None:
    kernel.manager.shutdown_kernel(now=False)


@pytest.mark.parametrize(
    "end",
    [kill_fork_server_first, stop_a_rank_then_kill, shut_down],
    ids=lambda end: end.__name__,
)
def test_nothing_of_a_cluster_outlives_its_kernel(
    tmp_path: Path, end: Callable[[Kernel, int], None]
) -> None:
    kernel = Kernel(tmp_path)
    try:
        for source in (START, CHILD, WAITING):
            assert not kernel.run(source).error
        folder, server, pids = json.loads(kernel.run(DESCRIBE).lines[-1])
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert len(processes) >= 6
        assert Path(folder).exists()
        end(kernel, server)
        wait_until_gone(processes, timeout=10)
        if end is kill_fork_server_first:  # nobody was left to remove it: the next kernel does
            assert_leftover_is_removed(tmp_path, folder)
        wait_until(lambda: not Path(folder).exists(), "the end of the run folder")
    finally:
        kernel.manager.shutdown_kernel(now=True)


def assert_leftover_is_removed(tmp_path: Path, folder: str) -> None:
    if not Path(folder).exists():
        return
    next_kernel = Kernel(tmp_path)
    try:
        assert not next_kernel.run("%load_ext ddpnb").error
    finally:
        next_kernel.stop()
