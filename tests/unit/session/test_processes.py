"""The kernel handles failed events and requests, and run folders."""

import errno
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.link import Exit, ForkServerLink, Member, Service
from ddpnb.forkserver import server as forkserver
from ddpnb.forkserver.server import ForkServer
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import (
    PATH_BYTES,
    RUN_FOLDER,
    KernelRequest,
    RankCommand,
    atomic_write,
    hold,
    may_have_gpus,
    parent_folder,
    parent_folders,
    private_folder,
    remove_leftovers,
)
from ddpnb.results.query import is_written, writer_of
from ddpnb.results.recorder import new_id
from tests.programs import printed, python


@pytest.fixture
def folder() -> Iterator[Path]:
    made = private_folder()
    with hold(made):
        yield made
    shutil.rmtree(made)


@pytest.fixture
def served(folder, monkeypatch) -> Iterator[tuple[ForkServerLink, list[Exit]]]:
    """A link to a fork server in a thread of this process, and the exits that the link reports."""
    ours, theirs = Pipe()
    exits: list[Exit] = []
    link = ForkServerLink(ours, on_exit=exits.append, on_end=lambda: None)
    monkeypatch.setattr(forkserver, "sigchld_wakeup", lambda: os.pipe()[0])
    server = ForkServer(kernel=theirs, folder=folder)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield link, exits
    link.begin_stop()
    thread.join(10)
    link.close()


@pytest.mark.parametrize("seed", range(5))
def test_answers_arrive_whole_however_a_rank_is_suspended(folder, seed):
    """A rank may be stopped within an answer, also within its length."""
    draw = random.Random(seed)
    ours, kernel = Pipe()
    rank, pipe = Pipe()
    server = ForkServer(kernel=kernel, folder=folder, unread={0: b""})
    answers = [{"id": n, "value": "x" * draw.choice([0, 10, 9000])} for n in range(20)]
    for each in answers:
        rank.send_bytes(json.dumps(each).encode())
    sent = os.read(pipe.fileno(), 1_000_000)
    while sent:
        size = draw.choice([1, 3, 5, 100, 20_000])
        os.write(rank.fileno(), sent[:size])
        sent = sent[size:]
        server.on_rank(0, pipe)
    assert [json.loads(ours.recv_bytes()) for _ in answers] == answers


@pytest.mark.parametrize("error", [OSError, TypeError, KeyError])
def test_a_handler_that_fails_does_not_deafen_the_kernel(error: type[Exception], capsys):
    ours, theirs = Pipe()
    heard: list[Member] = []

    def note(exit_: Exit) -> None:
        heard.append(exit_.member)
        if exit_.member == 0:
            raise error("a handler failed")

    link = ForkServerLink(ours, on_exit=note, on_end=lambda: heard.append(Service.FORK_SERVER))
    theirs.send_bytes(b"no frame")
    for rank in (0, 1):
        event = {"event": "exited", "member": rank, "code": -9, "log": ""}
        theirs.send_bytes(json.dumps(event).encode())
    theirs.close()
    assert link.is_over.wait(10)
    with pytest.raises(RuntimeError, match="has ended"):
        link.request(KernelRequest.SIGNAL, ranks=[], number=0).result(10)
    link._reader.join(10)
    assert heard == [0, 1, Service.FORK_SERVER]
    assert "a handler failed" in capsys.readouterr().err


def test_a_request_that_fails_or_is_not_known_costs_no_rank(served):
    link, _ = served
    with pytest.raises(RuntimeError, match="KeyError"):
        link.request("request of a later version").result(10)
    with pytest.raises(RuntimeError, match="TypeError"):
        link.request(KernelRequest.SIGNAL, ranks=None, number=2).result(10)
    assert link.request(KernelRequest.SIGNAL, ranks=[0], number=2).result(10) is None


def test_a_rank_that_the_system_does_not_start_ends_alone(monkeypatch, served):
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    link, exits = served
    link.start_rank(3, {})
    link.request(KernelRequest.SIGNAL, ranks=[], number=0).result(10)
    assert [each.member for each in exits] == [3]
    assert "could not be started" in str(exits[0])


def test_a_rank_that_does_not_read_keeps_no_signal_from_it(served, monkeypatch):
    """A stopped rank does not read, but SIGCONT must reach it."""
    with subprocess.Popen(["sleep", "600"]) as rank:
        monkeypatch.setattr(os, "fork", lambda: rank.pid)
        link, _ = served
        link.start_rank(0, {})
        link.request(KernelRequest.SIGNAL, ranks=[], number=0).result(10)
        text = "x" * 50_000
        for _ in range(20):  # more than fits into a socket
            fields = {"rank": 0, "command": RankCommand.ANSWER, "arguments": [text]}
            link.request(KernelRequest.FORWARD, **fields)
        link.request(KernelRequest.SIGNAL, ranks=[0], number=signal.SIGKILL).result(10)
        assert rank.wait(10) == -signal.SIGKILL


def test_a_run_is_written_until_its_process_ends_and_by_no_other_of_its_number():
    with python("print(flush=True); input()") as (child, _):
        writer = writer_of(psutil.Process(child.pid))
        place, began = writer.rsplit(" ", 1)
        assert is_written(writer)
        assert not is_written(f"{place} {float(began) - 60}")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # the child is a zombie
        assert not is_written(writer)
    assert not is_written(writer)


LOCKING = """
from pathlib import Path
from ddpnb.protocol.processes import hold
lock = hold(Path({folder!r}))
print(flush=True)
input()
"""


def test_a_run_folder_stays_until_its_fork_server_ends_even_by_a_kill():
    folder = private_folder()
    assert folder not in remove_leftovers(), "this process has just made the folder"
    with python(LOCKING.format(folder=str(folder))) as (server, _):
        assert folder not in remove_leftovers()
        server.kill()
    assert folder in remove_leftovers()
    assert not folder.exists()


@pytest.mark.parametrize("length", [30, PATH_BYTES, PATH_BYTES + 1, PATH_BYTES + 9, 108])
def test_every_socket_fits_into_the_folder_of_run_folders(
    monkeypatch: pytest.MonkeyPatch, length: int
):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        long = Path(short) / ("x" * (length - len(short) - 1))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        assert (long in parent_folders()) == (length <= PATH_BYTES)
        assert parent_folder() in parent_folders()
        run_folder = long / f"{RUN_FOLDER}{secrets.token_hex(8)}"  # the name that relays choose
        for name in ("profile/socket:65535", f"checks/{new_id()}-check.s"):
            (run_folder / name).parent.mkdir(parents=True)
            with socket.socket(socket.AF_UNIX) as end:
                if length <= PATH_BYTES:
                    end.bind(str(run_folder / name))
                elif length > PATH_BYTES + 8:
                    with pytest.raises(OSError, match="too long"):
                        end.bind(str(run_folder / name))


def test_without_a_folder_for_sockets_the_user_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ddpnb.protocol.processes.PATH_BYTES", 3)
    with pytest.raises(UserError, match="Set TMPDIR to a folder that you can write to"):
        parent_folder()
    assert remove_leftovers() == []


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path):
    path = tmp_path / "file"
    atomic_write(path, b"before")
    with pytest.raises(TypeError):
        atomic_write(path, "no bytes")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


COUNTING = """
import os, signal, time, torch
from ddpnb.forkserver import server as forkserver
forkserver.may_have_gpus = lambda: True
forkserver.COUNT_SECONDS = 1.0

def count_by(function):
    torch.cuda.device_count = function
    try:
        return forkserver.preload_modules()
    except RuntimeError as error:
        return "nvidia-smi" in str(error)

answers = [lambda: 3, lambda: time.sleep(100), lambda: os.kill(os.getpid(), signal.SIGKILL)]
print(forkserver.preload_modules(counts_gpus=False), *map(count_by, answers))
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
"""


def test_gpus_are_counted_without_a_second_import_of_torch():
    """A new interpreter would import torch for seconds, and would not see the new functions."""
    assert printed(COUNTING) == "0 3 True True\nno child is left\n"


@pytest.mark.parametrize("sign", ["dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg"])
def test_a_driver_is_found_even_if_nobody_has_used_it_yet(tmp_path: Path, sign: str):
    assert not may_have_gpus(tmp_path)
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    assert may_have_gpus(tmp_path)
