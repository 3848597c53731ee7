"""``%load_ext ddpnb`` starts a fork server that imports torch before the user starts ranks."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.processes import Preload
from ddpnb.protocol.processes import portable
from tests.cluster.rig import is_alive, wait_until, wait_until_gone
from tests.kernel.client import Kernel, both, kernel_in
from tests.places import OTHER_USER, inside

pytestmark = pytest.mark.skipif(portable(), reason="only forked ranks use an early import of torch")

START = "%ddp_start -n 2 --device cpu"
SESSION = "__import__('ddpnb').session.session.this_session()"
PRELOAD = "__import__('ddpnb').cluster.processes.preload"


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel that has just loaded ddpnb."""
    with kernel_in(tmp_path) as kernel:
        yield kernel


class Early:
    """The fork server that a kernel has started at ``%load_ext``, and its controller."""

    def __init__(self, kernel: Kernel) -> None:
        self.server = psutil.Process(int(kernel.value(f"{PRELOAD}.server.pid")))
        self.folder = Path(kernel.value(f"{PRELOAD}.server.folder"))

    @property
    def processes(self) -> list[psutil.Process]:
        return [self.server, *self.server.children(recursive=True)]


@contextlib.contextmanager
def gone_afterwards(early: Early) -> Iterator[None]:
    """Check that the fork server, its children and its run folder are gone at the end."""
    processes = early.processes
    assert early.folder.exists()
    yield
    wait_until_gone(processes, timeout=60)  # an import first ends
    wait_until(lambda: not early.folder.exists(), "the end of the run folder")


def wait_for_import(kernel: Kernel) -> None:
    """Wait until the fork server answers a request.  It answers after its imports."""
    request = f"{PRELOAD}.server.link.request('signal', ranks=[], number=0)"
    assert kernel.run(f"{request}.result(60)", timeout=90).passed


def server_of(kernel: Kernel) -> int:
    return int(kernel.value(f"{SESSION}._cluster.processes.server.pid"))


@pytest.mark.parametrize("imported", [False, True])
def test_a_start_uses_the_fork_server_of_the_load(loaded: Kernel, imported: bool):
    early = Early(loaded)
    if imported:
        wait_for_import(loaded)
    with gone_afterwards(early):
        assert "0 GPUs" in loaded.run("%ddp_start -n 2 --backend nccl").refusal
        assert loaded.run(f"{START} --threads 3").passed
        assert server_of(loaded) == early.server.pid
        assert early.server.num_threads() == 1, "forking is unsafe"
        source = "import os, torch, threadpoolctl\nprint(os.getppid(), os.nice(0), end=' ')\n"
        source += "print({pool['num_threads'] for pool in threadpoolctl.threadpool_info()})"
        said = f"{early.server.pid} {os.nice(0)} {{3}}"
        assert loaded.run(f"%%ddp\n{source}").by_rank == both(said)
        for sentence in ("The cluster has stopped", "No cluster was running"):
            assert sentence in loaded.run("%ddp_stop").stdout
    assert not loaded.processes


def test_what_ends_the_fork_server_without_a_start_leaves_nothing(loaded: Kernel):
    on_hosts = "%ddp_start --hosts a.invalid:1,b.invalid:1"
    for line in ("%unload_ext ddpnb", "%reload_ext ddpnb", "%ddp_stop", on_hosts):
        with gone_afterwards(Early(loaded)):
            assert loaded.run(line).error == ("UserError" if line == on_hosts else "")
        loaded.run("%unload_ext ddpnb\n%load_ext ddpnb")
    early = Early(loaded)
    loaded.run("%load_ext ddpnb")
    assert Early(loaded).server == early.server


def test_the_early_import_can_be_turned_off(tmp_path: Path):
    with kernel_in(tmp_path, {"DDPNB_PRELOAD": "0 wave"}) as kernel:
        assert not kernel.processes
        assert kernel.run(START).passed
        found = "'wave' in __import__('sys').modules"
        assert kernel.run(f"%%ddp\n{found}").by_rank == both("True")


@pytest.mark.parametrize("imported", [False, True])
def test_nothing_outlives_a_kernel_that_is_killed_before_a_start(loaded: Kernel, imported: bool):
    early = Early(loaded)
    if imported:
        wait_for_import(loaded)
    with gone_afterwards(early):
        loaded.manager.restart_kernel(now=True)
    loaded.client.wait_for_ready(timeout=60)


def kill(process: psutil.Process, early: Preload) -> None:
    process.kill()
    wait_until(lambda: bool(early.exits), "the message about the end")


CHANGES = {
    "environment": lambda patch, *_: patch.setenv("OMP_SCHEDULE", "static"),
    "folder": lambda patch, *_: patch.chdir("/"),
    "cores": lambda *_: os.sched_setaffinity(0, [*os.sched_getaffinity(0)][:1]),
    "controller": lambda _, server, early: kill(server.children()[0], early),
    "server": lambda _, server, early: kill(server, early),
    "nothing": lambda *_: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fork_server_that_is_outdated_or_damaged_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, change: str
):
    early, cores = Preload(), os.sched_getaffinity(0)
    early.start()
    server, folder = psutil.Process(early.server.pid), early.server.folder
    started = [server]
    try:
        if change == "controller":  # else its death is noticed only after the patient imports
            early.server.link.request("signal", ranks=[], number=0).result(60)
        started += server.children()
        CHANGES[change](monkeypatch, server, early)
        taken = early.take(print)
    finally:
        os.sched_setaffinity(0, cores)
    assert (taken is None) == (change != "nothing")
    if taken:
        taken.stop()
    wait_until_gone(started)
    wait_until(lambda: not folder.exists(), "the end of the run folder")


def test_a_start_replaces_a_fork_server_that_is_outdated(loaded: Kernel):
    (loaded.folder / "sub").mkdir()
    early = Early(loaded)
    with gone_afterwards(early):
        assert loaded.run("%env OMP_SCHEDULE=static\n%cd sub").passed
        assert loaded.run(START).passed
        assert server_of(loaded) != early.server.pid
    source = "import os, sys\nos.environ.get('OMP_SCHEDULE'), os.getcwd() in sys.path"
    assert loaded.run(f"%%ddp\n{source}").by_rank == both("('static', True)")


# The kernel looks so late that the ranks have already ended.
LOOKS_LATE = """
import time
from ddpnb.cluster import cluster
start = cluster.Cluster.start_rank
cluster.Cluster.start_rank = lambda *args, **given: (start(*args, **given), time.sleep(2))
"""


def test_a_failed_early_import_is_silent_and_the_start_says_why(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no wheel for this machine')")
    with kernel_in(tmp_path) as kernel:
        for preparation in ("", LOOKS_LATE):
            early = Early(kernel)
            wait_for_import(kernel)
            assert is_alive(early.server)
            assert kernel.run(preparation).passed
            cell = kernel.run(START)
            assert "no wheel for this machine" in cell.refusal
            assert not kernel.processes
            del kernel.cells[cell.request]
            assert kernel.run("%reload_ext ddpnb").passed
    assert "wheel" not in "".join(each.text for each in kernel.cells.values())


def test_an_interrupted_load_can_be_repeated(tmp_path: Path):
    kernel = Kernel(tmp_path)
    draw = random.Random(5)
    try:
        for _ in range(4):
            cell = kernel.begin("%load_ext ddpnb")
            time.sleep(draw.uniform(0, 0.4))
            kernel.interrupt()
            kernel.wait(cell)
            assert kernel.run("%load_ext ddpnb").passed
            with gone_afterwards(Early(kernel)):
                assert kernel.run("%unload_ext ddpnb").passed
        assert not kernel.processes
    finally:
        kernel.stop()


SHARES = """
import os, time
os.sched_setaffinity(0, [*os.sched_getaffinity(0)][:1])
import psutil
from ddpnb.cluster.processes import preload
if (pid := os.fork()) == 0:
    while True:
        pass
preload.start()
both = psutil.Process(pid), psutil.Process(preload.server.pid)

def share(is_over):
    before = [sum(each.cpu_times()[:2]) for each in both]
    while True:
        busy, early = (sum(p.cpu_times()[:2]) - t for p, t in zip(both, before))
        if is_over(busy):
            return early / (busy + early)
        time.sleep(0.01)

shares = [share(lambda busy: busy > 2)]
answer = preload.server.link.request("prepare", counts_gpus=False)
print(*shares, share(lambda _: answer.done()), answer.result())
os.kill(pid, 9)
"""


def test_the_early_import_leaves_the_core_to_others_until_it_is_needed(tmp_path: Path):
    """The user has no privileges, as a student on a hub."""
    words = [*inside(tmp_path, read_only=[], user=OTHER_USER), sys.executable, "-c", SHARES]
    printed = subprocess.check_output(words, text=True, timeout=180, cwd="/")
    early, needed, num_gpus = map(float, printed.split())
    assert early < 0.3 < needed, "0.5 is an equal share"
    assert num_gpus == 0
