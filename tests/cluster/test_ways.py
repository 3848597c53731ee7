"""Does what lies between a kernel and an agent pass all on, and end with either?"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from ddpnb.cluster.ssh import connected
from ddpnb.cluster.starter import free_ports
from ddpnb.cluster.tunnels import Tunnel, Tunnels
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
import selectors, socket, threading, time
from multiprocessing import Pipe
from pathlib import Path
from ddpnb.launcher.agent import refuse
from ddpnb.launcher.forkserver import Forkserver

def knock():
    while True:
        socket.create_connection(listener.getsockname()).close()
        time.sleep(0.1)

kernel, end = Pipe()
listener = socket.create_server(("127.0.0.1", 0))
server = Forkserver(kernel=end, folder=Path("."), method="none", silence_seconds=1.0)
server.selector.register(listener, selectors.EVENT_READ, refuse)
threading.Thread(target=knock, daemon=True).start()
server.serve()
print("over", flush=True)
"""


@pytest.fixture
def tunnel(monkeypatch, tmp_path) -> Iterator[Tunnel]:
    """The way to a host that has come: this one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ways = Tunnels("127.0.0.1", tmp_path)
    ports = free_ports("127.0.0.1", 1)
    file = ways.write_file(ports, is_once=True)
    tunnel = ways.open(ports[0], tmp_path / "host.log")
    words = [sys.executable, "-m", "ddpnb.launcher.tunnel", "come", str(file)]
    with subprocess.Popen(words) as program:
        wait_until(lambda: bool(tunnel.host), "the host")
        try:
            yield tunnel
        finally:
            tunnel.end()
            program.wait(30)


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


def test_a_cut_agent_ends_whoever_knocks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SILENT], cwd=tmp_path, timeout=30, capture_output=True, check=True
    )
    assert done.stdout == b"over\n"
