"""Does what lies between a kernel and an agent pass all on, and end with either?"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from ddpnb.cluster.ssh import connected
from ddpnb.cluster.starter import free_ports
from ddpnb.cluster.tunnels import Tunnel, Tunnels
from ddpnb.launcher.tunnel import command_of
from ddpnb.protocol.processes import AGENT_GREETING, KernelRequest
from tests.cluster.rig import wait_until, wait_until_gone

GREET = f"printf '%s' '{AGENT_GREETING.decode()}'; "
FRAME = json.dumps({"op": KernelRequest.PING, "text": "x" * 1_000_000}).encode()
RECORD = f"""
import os, sys
from multiprocessing.connection import Connection
os.write(1, {AGENT_GREETING!r})
kernel = Connection(0, writable=False)
while True:
    with open(sys.argv[1], "ab") as file:
        file.write(kernel.recv_bytes() + b"\\n")
"""
SILENT = """
import json, selectors, socket, sys, threading, time
from multiprocessing import Pipe
from pathlib import Path
from ddpnb.launcher.agent import refuse
from ddpnb.launcher.forkserver import Forkserver

def knock():
    while True:
        socket.create_connection(listener.getsockname()).close()
        time.sleep(0.1)

def ping():
    for _ in range(int(sys.argv[1])):
        kernel.send_bytes(json.dumps({"op": "ping"}).encode())
        time.sleep(0.2)

def answer(listener):
    time.sleep(1.5 if server.kernel.poll(0) else 0)
    refuse(listener)

kernel, end = Pipe()
listener = socket.create_server(("127.0.0.1", 0))
server = Forkserver(kernel=end, folder=Path("."), method="none", silence_seconds=1.0)
server.selector.register(listener, selectors.EVENT_READ, answer)
began = time.monotonic()
for each in (knock, ping):
    threading.Thread(target=each, daemon=True).start()
server.serve()
print(time.monotonic() - began, flush=True)
"""


@pytest.fixture
def come(monkeypatch, tmp_path) -> Iterator[tuple[Tunnel, psutil.Process]]:
    """The way to a host that has come, this one, and the program that came."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ways = Tunnels("127.0.0.1", tmp_path)
    ports = free_ports("127.0.0.1", 1)
    file = ways.write_file(ports, is_once=True)
    tunnel = ways.open(ports[0], tmp_path / "host.log")
    words = [sys.executable, "-m", "ddpnb.launcher.tunnel", "come", str(file)]
    with subprocess.Popen(words) as program:
        wait_until(lambda: bool(tunnel.host), "the host")
        try:
            yield tunnel, psutil.Process(program.pid)
        finally:
            tunnel.end()
            program.wait(30)


@pytest.fixture
def tunnel(come) -> Tunnel:
    return come[0]


def test_much_passes_in_both_directions_at_once(tunnel):
    _, pipe = tunnel.run(GREET + "exec cat")
    assert b"".join(os.read(pipe.fileno(), 1) for _ in AGENT_GREETING) == AGENT_GREETING
    sender = threading.Thread(target=lambda: [pipe.send_bytes(FRAME) for _ in range(20)])
    sender.start()
    came = 0
    while came < 20:
        assert pipe.poll(20)
        came += pipe.recv_bytes() == FRAME  # the keeper's own frames come back too
    sender.join()


def test_a_host_whose_program_does_not_end_is_left(tunnel, tmp_path):
    note = tmp_path / "pid"
    tunnel.run(GREET + f"sleep 600 & echo $! > {note}; wait")
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"), "the program")
    sleeper = psutil.Process(int(note.read_text()))
    (serve,) = psutil.Process(tunnel.process.pid).children()
    tunnel.process.kill()
    wait_until_gone([serve])
    sleeper.kill()


def test_a_kernel_that_is_busy_for_long_keeps_its_hosts(tmp_path):
    words = [sys.executable, "-c", RECORD, str(tmp_path / "frames")]
    process, pipe = connected(words, tmp_path / "log")
    frames = tmp_path / "frames"
    wait_until(lambda: frames.exists() and frames.read_text().count("ping") >= 2, "two pings")
    pipe.close()
    assert process.wait(30) == 1  # the recorder's end of its input is an error


def test_a_way_that_is_lost_with_much_on_it_ends_without_an_error(come, tmp_path):
    tunnel, program = come
    note = tmp_path / "pid"
    _, pipe = tunnel.run(GREET + f"echo $$ > {note}; exec sleep 3")
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"), "the program")
    sleeper = psutil.Process(int(note.read_text()))
    pipe.send_bytes(FRAME)
    (serve,) = psutil.Process(tunnel.process.pid).children()
    time.sleep(0.5)  # it is on its way
    program.suspend()
    serve.kill()
    wait_until_gone([sleeper])
    program.resume()
    assert program.wait(30) == 0


@pytest.mark.parametrize("num_pings", [0, 20])
def test_a_cut_agent_ends_whoever_knocks_and_one_that_is_slow_does_not(tmp_path, num_pings):
    words = [sys.executable, "-c", SILENT, str(num_pings)]
    done = subprocess.run(words, cwd=tmp_path, timeout=40, capture_output=True, check=True)
    assert float(done.stdout) > 0.2 * num_pings


def test_the_command_that_has_a_host_come_may_tidy_up(tmp_path):
    script = f"trap 'rm {tmp_path}/file; exit' TERM; touch {tmp_path}/file; sleep 60 & wait"
    with command_of({"command": ["sh", "-c", script]}) as command:
        wait_until(lambda: (tmp_path / "file").exists(), "the command's file")
        left = psutil.Process(command.pid).children()
    assert not (tmp_path / "file").exists()
    wait_until_gone(left)
