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
from tests.kernel.client import Kernel
from tests.system_packages import find_program
from tests.unit.history.test_store import WRITER

ROOT = Path(__file__).parents[2]
COMPARE = "%ddp_compare ddp --task digits --epochs 20 --no-baseline --name {name}"
BEGIN = "%load_ext ddpnb\n%ddp_start -n 2 --device cpu"


@contextlib.contextmanager
def tiny_disk(path: Path) -> Iterator[None]:
    """Mount a file system of 1 MB; skip where one may not."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


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


def test_a_training_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    find_program(["mount"], "a small file system needs mount(8)")
    with tiny_disk(tmp_path):
        (tmp_path / "data").mkdir()
        (tmp_path / "notebooks").mkdir()
        kernel = Kernel(tmp_path)
        try:
            assert not kernel.run(BEGIN).error
            assert not kernel.run(COMPARE.format(name="before"), timeout=120).error
            fill(tmp_path / "filler")
            check_it_trains_unsaved(kernel, "full")
            assert "before" in kernel.run("%ddp_runs").text
            (tmp_path / "filler").unlink()
            assert not kernel.run(COMPARE.format(name="after"), timeout=120).error
            runs = kernel.run("%ddp_runs").text
            assert "before" in runs
            assert "after" in runs
        finally:
            kernel.stop()


LIMIT = """
import resource, signal
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, hard))
"""


def test_a_training_goes_on_when_the_file_may_not_grow(tmp_path: Path) -> None:
    """A quota, which needs no right to set."""
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    kernel = Kernel(tmp_path)
    try:
        assert not kernel.run(BEGIN).error
        assert not kernel.run(COMPARE.format(name="before"), timeout=120).error
        size = (tmp_path / "data" / "runs" / FILE_NAME).stat().st_size
        assert not kernel.run(LIMIT.format(size=size)).error
        check_it_trains_unsaved(kernel, "full")
        assert "before" in kernel.run("%ddp_runs").text
        assert not kernel.run("resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))").error
        assert not kernel.run(COMPARE.format(name="after"), timeout=120).error
        runs = kernel.run("%ddp_runs").text
        assert "before" in runs
        assert "after" in runs
    finally:
        kernel.stop()


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
