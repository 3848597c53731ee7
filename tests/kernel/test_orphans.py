"""However a kernel ends, so does its cluster: no process and no file of it is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient

from tests.cluster.rig import is_alive, wait_until, wait_until_gone
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
print(json.dumps([str(cluster.folder), cluster.processes.pid, pids]))
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


def restart_now(kernel: Kernel, server: int) -> None:
    kernel.manager.restart_kernel(now=True)


def shut_down(kernel: Kernel, server: int) -> None:
    kernel.manager.shutdown_kernel(now=False)


@pytest.mark.parametrize(
    "end",
    [kill_fork_server_first, stop_a_rank_then_kill, restart_now, shut_down],
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


def execute(client: BlockingKernelClient, source: str) -> str:
    printed: list[str] = []

    def hear(message: dict) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(source, timeout=60, allow_stdin=False, output_hook=hear)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


def test_nothing_outlives_a_jupyter_server_that_is_asked_to_end(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    env |= {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, "-m", "jupyter", "server", "--no-browser", "--port=0"]
    command += ["--allow-root", "--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path}"]
    command += ["--ServerApp.disable_check_xsrf=True"]
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            runtime = tmp_path / "runtime"
            wait_until(lambda: is_written(runtime, "jpserver-*.json"), "the server", 60)
            url = json.loads(next(runtime.glob("jpserver-*.json")).read_text())["url"]
            start_a_kernel(url)
            wait_until(lambda: is_written(runtime, "kernel-*.json"), "the kernel", 30)
            client = BlockingKernelClient(connection_file=str(next(runtime.glob("kernel-*.json"))))
            client.load_connection_file()
            client.hb_channel.time_to_dead = 60  # the kernel may take longer than 1 s to begin
            client.start_channels()
            client.wait_for_ready(timeout=60)
            for source in (START, CHILD):
                execute(client, source)
            folder, _, pids = json.loads(execute(client, DESCRIBE).splitlines()[-1])
            client.stop_channels()
            processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
            assert len([process for process in processes if is_alive(process)]) >= 6
            server.send_signal(signal.SIGTERM)
            wait_until_gone([*processes, psutil.Process(server.pid)], timeout=15)
            wait_until(lambda: not Path(folder).exists(), "the end of the run folder")
        finally:
            server.kill()


def is_written(folder: Path, pattern: str) -> bool:
    return any(path.stat().st_size for path in folder.glob(pattern))


def start_a_kernel(url: str) -> None:
    """Ask as JupyterLab does: ``POST /api/kernels``."""
    import urllib.request

    deadline = time.monotonic() + 30
    while True:
        try:
            request = urllib.request.Request(f"{url}api/kernels", data=b"{}", method="POST")
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 201
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
