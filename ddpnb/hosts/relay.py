"""The relay of a host: it starts the agent there, and passes its frames on (relay).

ssh or a launcher of ipyparallel starts ``python -m ddpnb.hosts.relay``.  It connects to the kernel,
over a Unix socket that ssh forwards or over TCP.  Where to, and the keys, it reads from its
standard input, or from the file that is its first argument.  ZMQ and its threads stay out of the
agent, which forks.

When the connection is lost, however the kernel has ended, the relay closes the agent's pipe, which
ends the ranks.  When the agent has ended, the relay kills what it left, and removes its files.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from ddpnb.hosts.network import address_of_ssh, interfaces
from ddpnb.hosts.wire import LOST_MS, Word, keep_alive
from ddpnb.protocol.processes import RUN_FOLDER, limit_waits, parent_folder

SHARED_SECONDS = 10.0
"""How long a file of another host may take to appear on a disk that both share."""
WAIT_SECONDS = 10.0
"""How long an agent may take to read a frame, or to write one that it has begun."""
END_SECONDS = 10.0
"""How long an agent may take to end its ranks once its pipe is closed."""
LOG_BYTES = 4096
TASK_VARIABLES = (
    *("OMPI_", "PMIX_", "PMI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP"),
)
"""Variables, or their beginnings, by which libraries would take a rank for the launcher's task."""


class Relay:
    """The connection to the kernel, and one agent after the other."""

    def __init__(self, place: dict[str, Any], kernel: "zmq.Socket[bytes]") -> None:
        """Connect; see ``Router.place`` for what ``place`` has."""
        self._token = place["token"]
        self._name = place["name"] or secrets.token_hex(8)
        self._folder = parent_folder() / f"{RUN_FOLDER}{self._name}"
        self._forwarded = place["forwarded"]
        self._is_welcome = False
        self._deadline = time.monotonic() + LOST_MS / 1000
        self._kernel = kernel
        kernel.curve_publickey, kernel.curve_secretkey = zmq.curve_keypair()
        kernel.curve_serverkey = place["key"].encode()
        keep_alive(kernel)
        kernel.reconnect_ivl = -1
        self._monitor = kernel.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        kernel.connect(place["endpoint"])

    def run(self) -> bool:
        """Run agents until the kernel has gone; return whether it had ever answered."""
        while self._run_agent() and self._wait_for_start():
            pass
        return self._is_welcome

    def _run_agent(self) -> bool:
        """Run one agent to its end; return whether the kernel is there."""
        pipe, theirs = Pipe()
        limit_waits(pipe, write_seconds=WAIT_SECONDS, read_seconds=WAIT_SECONDS).close()
        words = [str(theirs.fileno()), str(self._folder), self._forwarded]
        with tempfile.TemporaryFile() as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "ddpnb.hosts.agent", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith(TASK_VARIABLES)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            try:
                is_connected = self._pass_on(pipe)
            finally:
                pipe.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(END_SECONDS)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(agent.pid, signal.SIGKILL)  # it, or what it has left
                agent.wait()
                shutil.rmtree(self._folder, ignore_errors=True)
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            if is_connected:
                self._send(Word.ENDED, log.read())
        return is_connected

    def _pass_on(self, pipe: Connection) -> bool:
        """Pass frames on until the agent has ended, or the kernel; return whether that is there."""
        hello = {
            "token": self._token,
            "name": self._name,
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "addresses": [each for found in interfaces().values() for each in found],
            "reached": address_of_ssh(),
        }
        self._send(Word.HELLO, json.dumps(hello).encode())
        while ready := self._poll(pipe.fileno()):
            try:
                if pipe.fileno() in ready:
                    self._send(Word.FRAME, pipe.recv_bytes())
                if self._kernel in ready:
                    word, content = self._kernel.recv_multipart()
                    self._is_welcome |= word == Word.WELCOME
                    if word == Word.FRAME:
                        pipe.send_bytes(content)
                    elif word == Word.CLOSE:
                        return True
            except (EOFError, OSError):
                return True
        return False

    def _wait_for_start(self) -> bool:
        """Wait until an agent is to be started again; return False once the kernel has gone."""
        while ready := self._poll():
            if self._kernel in ready and self._kernel.recv_multipart()[0] == Word.START:
                return True
        return False

    def _poll(self, *fds: int) -> dict[Any, int]:
        """Return what can be read, once there is something; nothing if the kernel is lost."""
        poller = zmq.Poller()
        for each in (self._kernel, self._monitor, *fds):
            poller.register(each, zmq.POLLIN)
        ready: dict[Any, int] = {}
        while not ready and (self._is_welcome or time.monotonic() < self._deadline):
            ready = dict(poller.poll(1000))
        return {} if self._monitor in ready else ready

    def _send(self, word: Word, content: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # it is lost, as ``_poll`` reports
            self._kernel.send_multipart([word, content], zmq.NOBLOCK)


def read_place(path: str) -> dict[str, Any]:
    """Return the kernel's place from a file, which may have yet to appear, or standard input."""
    deadline = time.monotonic() + SHARED_SECONDS
    while path and not os.path.exists(path):
        if time.monotonic() > deadline:
            sys.exit(f"no file with keys, {path}")
        time.sleep(0.05)
    return dict(json.loads(Path(path).read_text() if path else sys.stdin.readline()))


def main(path: str = "", *_: str) -> None:
    """Be the relay; launchers may add words of their own to the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    place = read_place(path)
    with zmq.Context() as context, context.socket(zmq.DEALER) as kernel:
        relay = Relay(place, kernel)
        try:
            if not relay.run():
                sys.exit(f"no answer at {place['endpoint']}")
        finally:
            kernel.disable_monitor()


if __name__ == "__main__":
    main(*sys.argv[1:])
