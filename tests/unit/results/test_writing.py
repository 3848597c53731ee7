"""The disk may be full, locked or slow: training does not wait, and lost steps are counted."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.reports.listing import runs_table
from ddpnb.reports.result import ComparisonResult
from ddpnb.results import query
from ddpnb.results.recorder import Recorder, new_id
from ddpnb.results.run import Status
from ddpnb.results.store import FILE_NAME, Store, StoreError
from tests.unit.results.fake_runs import batch, header, spec, step

NUM_STEPS = 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=6m", "ddpnb-test", str(folder)]
    if os.getuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def recorded(store: Store, said: list[str], name: str) -> Recorder:
    words = {"task": "digits", "source": "", "specs": (), "notify": said.append}
    return Recorder(store, name=name, **words)


def train(recorder: Recorder, name: str, sequences: range = range(5)) -> str:
    """Record a run up to its last step."""
    run_id = new_id()
    recorder.begin(run_id, name, spec(name))
    for sequence in sequences:
        steps = [step(i, i + 1.0) for i in range(NUM_STEPS // 5)]
        recorder.add(batch(run_id, steps, sequence=sequence, header=header(spec(name), 5)))
    return run_id


def test_a_disk_that_fills_and_is_freed_loses_no_step(disk: Path):
    store, said = Store(disk / "runs", flush_seconds=0.05), list[str]()
    earlier = recorded(store, said, "earlier")
    earlier.end(train(earlier, "ddp"), Status.FINISHED)
    assert said == []
    full = subprocess.run(["dd", "if=/dev/zero", f"of={disk}/ballast"], capture_output=True)
    assert b"space" in full.stderr
    for name in ("race", "other"):
        recorder = recorded(store, said, name)
        recorder.end(train(recorder, "ddp"), Status.FINISHED)
    assert len(said) == 2  # one sentence for each comparison
    assert all("the disk is full" in each for each in said)
    run_id = train(recorder, "async")
    (disk / "ballast").unlink()
    recorder.end(run_id, Status.FAILED, "rank 1 died")
    store.flush()
    found = {run.address: (run.status, run.detail, run.num_events) for run in store.list()}
    finished = (Status.FINISHED, "", NUM_STEPS)
    for address in ("earlier/ddp#1", "race/ddp#1", "other/ddp#1"):
        assert found.pop(address) == finished
    assert found == {"other/async#1": (Status.FAILED, "rank 1 died", NUM_STEPS)}
    assert len(said) == 2
    store.close()


def test_steps_that_are_not_stored_are_counted(tmp_path: Path):
    store, said = Store(tmp_path, flush_seconds=0.05), list[str]()
    recorder = recorded(store, said, "race")
    run_id = train(recorder, "ddp", range(2))
    store.flush()
    num_pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {num_pages}")
    steps = [step(0, 1.0)] * NUM_STEPS
    recorder.add(batch(run_id, steps, sequence=3))
    recorder.end(run_id, Status.FINISHED)
    with pytest.raises(StoreError, match="full"):
        store.flush()
    (run,) = store.list()
    words = f"steps not stored: {NUM_STEPS:,} (the disk is full)"
    assert (run.status, run.detail) == (Status.FINISHED, words)
    assert words in runs_table((run,)).text()
    assert words in ComparisonResult(store.load("race")).table().text()
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.flush()
    (run,) = store.list()
    assert (run.status, run.detail) == (Status.FINISHED, "")
    store.close()


def test_a_locked_store_delays_no_call_and_is_written_later(tmp_path: Path):
    store, said = Store(tmp_path, flush_seconds=0.05), list[str]()
    recorder = recorded(store, said, "race")
    run_id = train(recorder, "ddp", range(1))
    store.flush()
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    slowest = 0.0
    until = time.monotonic() + 2.0
    for sequence in range(1, 1000):
        began = time.monotonic()
        recorder.add(batch(run_id, [step(sequence, 1.0)], sequence=sequence))
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.01)
        if time.monotonic() > until:
            break
    began = time.monotonic()
    recorder.end(run_id, Status.FINISHED)
    assert slowest < 1
    assert time.monotonic() - began < 3
    other.execute("COMMIT")
    other.close()
    store.flush()
    (run,) = store.list()
    assert (run.status, run.num_events) == (Status.FINISHED, NUM_STEPS // 5 + sequence)
    store.close()


def test_the_end_of_the_kernel_writes_what_is_pending(tmp_path: Path):
    code = f"""
from tests.unit.results.test_writing import *
store = Store(Path({str(tmp_path)!r}), flush_seconds=1000)
recorder = recorded(store, [], "race")
train(recorder, "ddp")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Store(tmp_path).list()[0].num_events == NUM_STEPS


def test_the_thread_ends_with_the_last_run(tmp_path: Path):
    before = set(threading.enumerate())
    store = Store(tmp_path, flush_seconds=0.01)
    recorder = recorded(store, [], "race")
    run_id = train(recorder, "ddp")
    assert len(set(threading.enumerate()) - before) == 1
    recorder.end(run_id, Status.FINISHED)
    until = time.monotonic() + 10
    while set(threading.enumerate()) - before:
        assert time.monotonic() < until
        time.sleep(0.01)
    store.close()


def moved_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


@pytest.mark.parametrize("jump", [-3600, 86_400, 0])
@pytest.mark.parametrize("place", ["this host", "other host", "this process before a clock change"])
def test_a_run_is_deleted_only_if_nothing_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float, place: str
):
    store, other = Store(tmp_path, flush_seconds=0.05), Store(tmp_path)
    recorder = recorded(store, [], "race")
    run_id = train(recorder, "ddp")
    store.flush()
    host, pid, began = query.writer_of().rsplit(" ", 2)
    if place != "this host":
        writer = f"{host} {pid} 1.0" if "process" in place else f"lab 7 {pid} {began}"
        with sqlite3.connect(tmp_path / FILE_NAME) as connection:
            connection.execute("UPDATE runs SET writer = ?", (writer,))
        connection.close()
    moved_clock(monkeypatch, jump)
    time.sleep(1)  # for the next heartbeat
    with pytest.raises(UserError, match="is being trained"):
        other.delete("race")
    store._writer.running.clear()  # the kernel is gone
    if place != "this host":
        moved_clock(monkeypatch, 7200)
        assert "no sign of life from" in other.list()[0].detail
        assert other.delete("race") == ("race/ddp#1",)
    recorder.end(run_id, Status.FINISHED)
    store.close()
    other.close()


@pytest.mark.parametrize("jump", [-3600, 86_400])
def test_the_latest_run_is_the_one_that_began_last(tmp_path: Path, jump: float):
    store = Store(tmp_path)
    for name in ("a", "b"):
        recorder = recorded(store, [], name)
        recorder.end(train(recorder, "ddp", range(1)), Status.FINISHED)
    store._connection.execute(f"UPDATE runs SET created = created + {jump} WHERE rowid = 2")
    assert [run.comparison for run in store.list()] == ["a", "b"]
    assert {run.comparison for run in store.load("ddp").runs} == {"b"}
    assert runs_table(store.list()).rows[0][0].text == "b/ddp"
    store.close()


def test_the_file_of_an_earlier_version_gets_heartbeats_and_stays_readable(tmp_path: Path):
    store = Store(tmp_path)
    store._connection.execute("ALTER TABLE runs DROP COLUMN heartbeat")
    recorded(store, said := [], "empty")
    assert (store.folder, said) == (tmp_path, [])
    recorder = recorded(store, [], "race")
    run_id = train(recorder, "ddp", range(1))
    store.flush()
    recorder.end(run_id, Status.FINISHED)
    assert store._connection.execute("SELECT heartbeat FROM runs").fetchone()[0] is not None
    earlier = "INSERT INTO runs (id, comparison, name, repeat, created, writer, status, spec)"
    store._connection.execute(
        f"{earlier} SELECT 'r2', comparison, 'b', 0, 1.0, writer, 'running', NULL FROM runs"
    )
    assert [run.status for run in store.list()] == [Status.FINISHED, Status.RUNNING]
    store.close()
