"""A kernel that dies while it trains: what was trained is read by the next one."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel.client import Kernel


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path


def test_a_run_is_readable_up_to_its_last_flush_after_a_sigkill(project: Path):
    first = Kernel(project)
    pid = int(first.run("import os\nprint(os.getpid())").stdout)
    first.run("%load_ext ddpnb\n%ddp_start -n 2 --device cpu")
    first.run(
        "running = %ddp_compare ddp --task digits --epochs 500 --no-baseline --no-wait --name cut"
    )
    deadline = time.monotonic() + 60
    seen = 0
    while seen < 100:
        assert time.monotonic() < deadline, "nothing was trained"
        time.sleep(0.5)
        seen = int(first.run("print(len(running.result.steps()))").stdout)
    time.sleep(1.5)  # longer than the store gathers
    family = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    first.client.stop_channels()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    second = Kernel(project)
    try:
        second.run("%load_ext ddpnb")
        listed = second.run("%ddp_runs").text
        assert "cut/ddp" in listed
        assert "stopped: its kernel ended; kept up to the last flush" in listed
        kept = int(second.run("import ddpnb\nprint(len(ddpnb.load('cut').steps()))").stdout)
        assert kept >= seen
        drawn = second.run("%ddp_plot cut")
        assert len(drawn.bundles("image/png")) == 1
        assert (
            "%ddp_compare ddp --task digits --epochs 500" in second.run("%ddp_runs --show cut").text
        )
    finally:
        second.stop()
