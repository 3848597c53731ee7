import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.link import Service
from ddpnb.protocol.errors import UserError
from tests.cluster import rig
from tests.programs import python

STARTS = """
import os, subprocess
for words in ("", "setsid", "setsid -f", "nohup setsid"):
    subprocess.Popen([*words.split(), "sleep", "1000"])
"""
"""Starts programs, also in sessions of their own and without a parent."""
OWNER = f"""
import json, sys
from tests.cluster import rig
STARTS = {STARTS!r}
with rig.started(2) as cluster:
    rig.run(cluster, rig.ALL_REDUCE + STARTS)
    rig.begin(cluster, "dist.all_reduce(total) if rank else __import__('time').sleep(1000)")
    pids = [process.pid for process in rig.processes_of(cluster)]
    print(json.dumps([str(cluster.folder), pids]), flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def owned() -> Iterator[tuple[int, Path, list[psutil.Process]]]:
    """Start a process with a busy cluster. Yield its pid, the run folder and the processes."""
    with python(OWNER) as (owner, line):
        folder, pids = json.loads(line)
        yield owner.pid, Path(folder), [psutil.Process(pid) for pid in pids]


def test_nothing_outlives_the_process_that_started_it():
    """Even a stopped rank ends."""
    with owned() as (owner, folder, processes):
        server, *others = processes  # the controller, the ranks, two sleeps
        assert len(others) >= 5
        max(server.children(), key=lambda child: child.pid).suspend()
        os.kill(owner, signal.SIGKILL)
        rig.wait_until_gone(processes, timeout=10)
        rig.wait_until(lambda: not folder.exists(), "the end of the run folder")


def test_nothing_outlives_a_kernel_whose_fork_server_is_suspended():
    with owned() as (owner, folder, processes):
        processes[0].suspend()
        os.kill(owner, signal.SIGKILL)
        rig.wait_until_gone(processes, timeout=60)
        assert not folder.exists()


def test_nothing_outlives_both_at_once():
    """Even the cells' child processes end, although only the ranks know of these processes."""
    with owned() as (owner, folder, processes):
        try:
            server, *others = processes
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, so that neither can react
                os.kill(owner, number)
                server.send_signal(number)
            rig.wait_until_gone(others, timeout=10)
        finally:
            for process in processes:
                if rig.is_alive(process):
                    process.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("service", list(Service))
def test_the_end_of_a_service_is_reported_and_nothing_outlives_it(service: Service):
    with rig.started(2) as cluster:
        processes = rig.processes_of(cluster)
        server = service is Service.FORK_SERVER
        (processes[0] if server else rig.controller_of(cluster)).kill()
        if server:
            rig.wait_until_gone(processes, timeout=10)
            rig.wait_until(lambda: not cluster.folder.exists(), "the end of the run folder")
        rig.wait_until(lambda: cluster.lost is not None, "word of the end")
        assert cluster.lost == f"the {service} was killed by SIGKILL"
        assert cluster.living == (() if server else (0, 1))
        with pytest.raises(UserError, match=r"The cluster has ended: .*%ddp_restart"):
            rig.run(cluster, "1")
        cluster.stop()
        assert not cluster.folder.exists()
        assert not [process for process in processes if rig.is_alive(process)]


def test_a_stop_ends_programs_without_the_clusters_environment_but_none_that_is_kept():
    with rig.started(2) as cluster:
        start = "subprocess.Popen(['setsid', 'sleep', '1000'], env={})"
        rig.run(cluster, STARTS + start)
        more = "env={**os.environ, 'DDPNB_KEEP': '1'}, start_new_session=True"
        rig.run(cluster, f"kept = subprocess.Popen(['sleep', '1000'], {more})")
        kept = [psutil.Process(pid) for pid in rig.pull(cluster, "kept.pid")]
        processes = {*rig.processes_of(cluster)} - {*kept}
        assert len(processes) >= 2 + 2 * 6
        cluster.stop()
        assert not [process for process in processes if rig.is_alive(process)]
        assert all(rig.is_alive(process) for process in kept)
        for process in kept:
            process.kill()
