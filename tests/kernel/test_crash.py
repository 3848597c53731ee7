"""A kernel that dies while it trains: what was trained is read by the next one."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ddpnb.history.store import Store
from tests.cluster.rig import DYNAMO, wait_until_gone
from tests.kernel.client import Kernel

LINE = "%ddp_compare ddp --task digits --epochs 100000"
"""It would train for hours."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path


def num_stored(project: Path) -> int:
    """Return how many steps stand in the project's store, as another process sees it."""
    store = Store(project / "data" / "runs")
    try:
        return sum(len(run.events) for run in store.load("cut").runs)
    finally:
        store.close()


def test_a_run_is_readable_up_to_its_last_flush_after_a_sigkill(project: Path):
    first = Kernel(project, DYNAMO)
    pid = int(first.run("import os\nprint(os.getpid())").stdout)
    first.run("%load_ext ddpnb\n%ddp_start -n 2 --device cpu")
    first.run(
        f"running = {LINE} --no-baseline --no-wait --name cut",
    )
    deadline = time.monotonic() + 60
    seen = 0
    while seen < 100:
        assert time.monotonic() < deadline, "nothing was trained"
        time.sleep(0.5)
        seen = int(first.run("print(len(running.result.steps()))").stdout)
    while num_stored(project) < seen:
        assert time.monotonic() < deadline, "what was trained was not stored"
        time.sleep(0.5)
    family = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    first.client.stop_channels()
    wait_until_gone(family)
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
        assert LINE in second.run("%ddp_runs --show cut").text
    finally:
        second.stop()
