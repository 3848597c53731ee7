"""Runs are written to a disk that is full, or by a kernel that is killed."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.history.store import FILE_NAME, Store
from tests.cluster.rig import DYNAMO
from tests.kernel.client import Kernel
from tests.system_packages import find_program
from tests.unit.history.test_store import WRITER

ROOT = Path(__file__).parents[2]
COMPARE = "%ddp_compare ddp --task digits --epochs 8 --no-baseline --name {name}"
"""It sends its steps several times, at intervals of half a second."""
BEGIN = "%load_ext ddpnb\n%ddp_start -n 2 --device cpu"


@contextlib.contextmanager
def tiny_disk(path: Path) -> Iterator[bool]:
    """Mount a file system of 1 MB; yields whether one may."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    find_program(["mount"], "a small file system needs mount(8)")
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="module")
def on_tiny_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kernel, bool]]:
    """A kernel that has trained in a folder; whether that is a small disk of its own."""
    folder = tmp_path_factory.mktemp("disk")
    with tiny_disk(folder) as is_mounted:
        (folder / "data").mkdir()
        (folder / "notebooks").mkdir()
        kernel = Kernel(folder, DYNAMO)
        try:
            assert not kernel.run(BEGIN).error
            assert not kernel.run(COMPARE.format(name="before"), timeout=120).error
            yield kernel, is_mounted
        finally:
            kernel.stop()


def fill(path: Path) -> None:
    """Take all the space that is left."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as filler:
        while filler.write(bytes(1024)):
            pass
    assert shutil.disk_usage(path).free == 0


def check_it_trains_unsaved(kernel: Kernel, name: str) -> None:
    cell = kernel.run(COMPARE.format(name=name), timeout=120)
    assert not cell.error, cell.error_text
    assert cell.text.count("The runs are not being saved") == 1
    assert "held-out" in cell.text or "accuracy" in cell.text
    assert "before" in kernel.run("%ddp_runs").text


def check_it_is_saved_again(kernel: Kernel, name: str) -> None:
    assert not kernel.run(COMPARE.format(name=name), timeout=120).error
    runs = kernel.run("%ddp_runs").text
    assert "before" in runs
    assert name in runs


def test_a_training_goes_on_when_the_disk_is_full(on_tiny_disk: tuple[Kernel, bool]) -> None:
    kernel, is_mounted = on_tiny_disk
    if not is_mounted:
        pytest.skip("a small file system needs the right to mount")
    fill(kernel.folder / "filler")
    check_it_trains_unsaved(kernel, "full")
    (kernel.folder / "filler").unlink()
    check_it_is_saved_again(kernel, "with-room")


LIMIT = """
import resource, signal
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, hard))
"""


def test_a_training_goes_on_when_the_file_may_not_grow(on_tiny_disk: tuple[Kernel, bool]) -> None:
    """A quota, which needs no right to set."""
    kernel, _ = on_tiny_disk
    size = (kernel.folder / "data" / "runs" / FILE_NAME).stat().st_size
    assert not kernel.run(LIMIT.format(size=size)).error
    check_it_trains_unsaved(kernel, "limited")
    assert not kernel.run("resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))").error
    check_it_is_saved_again(kernel, "without-limit")


def test_runs_are_readable_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in range(8):
        folder = tmp_path / str(number)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline().strip() == "writing"
            time.sleep(chance.uniform(0, 0.05))
            os.kill(writer.pid, signal.SIGKILL)
        store = Store(folder)
        runs = store.list()
        store.close()
        (run,) = runs
        assert run.num_events >= 300
        assert run.num_events % 50 == 0  # each batch whole or not at all
        with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
