"""Processes as the kernel sees them: events that go wrong, damaged files, files that are whole."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.processes import Exit, Member, Processes, Service, describe_exit
from ddpnb.cluster.run_folder import private_folder
from ddpnb.launcher.forkserver import Forkserver
from ddpnb.protocol.processes import SERVER_LOCK, atomic_write, hold, is_alive, process_id


@pytest.fixture
def ended() -> Iterator[subprocess.Popen[bytes]]:
    """Return a fork server that has ended."""
    with subprocess.Popen(["true"], start_new_session=True) as server:
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        yield server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run folder that this process needs."""
    made = private_folder()
    with hold(made / SERVER_LOCK):
        yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("error", [OSError, TypeError, KeyError])
def test_a_handler_that_fails_does_not_deafen_the_kernel(error: type[Exception], ended, capsys):
    ours, theirs = Pipe()
    heard: list[Member] = []

    def note(exit_: Exit) -> None:
        heard.append(exit_.member)
        if exit_.member == 0:
            raise error("a handler failed")

    processes = Processes(pipe=ours, server=ended, on_exit=note)
    processes._reader.start()
    for rank in (0, 1):
        event = {"event": "exited", "name": str(rank), "code": -9}
        theirs.send_bytes(json.dumps(event).encode())
    theirs.close()
    processes._reader.join(10)
    assert heard == [0, 1, Service.FORK_SERVER]
    assert "a handler failed" in capsys.readouterr().err


def test_a_number_that_is_another_process_by_now_is_not_killed():
    ours, theirs = Pipe()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        processes = Processes(pipe=ours, server=other, on_exit=lambda _: None)
        processes.process = (other.pid, process_id(other.pid)[1] - 100)
        processes._reader.start()
        theirs.close()
        processes._reader.join(10)
        assert other.poll() is None
        other.kill()


def test_what_an_ended_server_had_started_is_killed():
    ours, theirs = Pipe()
    words = ["sh", "-c", "sleep 600 & echo $!"]
    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        left = psutil.Process(int(server.stdout.readline()))
        processes = Processes(pipe=ours, server=server, on_exit=lambda _: None)
        processes._reader.start()
        theirs.close()
        processes._reader.join(10)
        left.wait(10)


def test_a_rank_that_the_system_does_not_start_ends_alone(monkeypatch, folder, ended):
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = Pipe()
    monkeypatch.setattr(os, "fork", fork)
    server = Forkserver(kernel=theirs, folder=folder, method="fork")
    server.start_rank(rank=3, environment={}, settings={})
    exits: list[Exit] = []
    processes = Processes(pipe=ours, server=ended, on_exit=exits.append)
    processes._handle(json.loads(ours.recv_bytes()))
    said = "could not be started ([Errno 11] Resource temporarily unavailable)"
    assert [describe_exit(each) for each in exits] == [said]


def test_a_process_is_alive_until_it_ends_and_no_other_is_taken_for_it():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pid, began = process_id(child.pid)
    assert is_alive((pid, began))
    assert is_alive((pid, round(began, 2)))
    assert not is_alive((pid, began - 60))
    child.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # nobody has reaped it yet
    assert not is_alive((pid, began))
    child.wait(10)
    assert not is_alive((pid, began))


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path):
    path = tmp_path / "file"
    atomic_write(path, b"before")
    with pytest.raises(TypeError):
        atomic_write(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folders_of_a_file_are_synced_after_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, synced = tmp_path / "file", []

    def fsync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_write(path, b"content", synced_folders=path.parents[:2])
    (draft, was_there), *folders = synced
    assert draft.startswith(str(path))
    assert not was_there
    assert folders == [(str(tmp_path), True), (str(tmp_path.parent), True)]
