"""The relay of a host: starts the agent, and forwards frames between agent and kernel.

ssh or a launcher of ipyparallel starts ``python -m ddpnb.hosts.relay``.  The relay connects to the
kernel over TCP or over a Unix socket that ssh forwards.  The relay reads the kernel's address and
the keys from standard input, or from the file named by its first argument.  ZMQ's threads run in
the relay, not in the agent, because the agent forks.

When the connection to the kernel is lost, the relay closes the agent's pipe, so that the ranks end.
When the agent ends, the relay kills the agent's other processes and removes the run folder.
Runs in the relay.
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
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from ddpnb.hosts.network import address_of_ssh
from ddpnb.hosts.wire import COME_MS, Word, keep_alive
from ddpnb.protocol.processes import PIPE_SECONDS, RUN_FOLDER, limit_waits, parent_folder

SHARED_SECONDS = 10.0
"""Maximum seconds to wait until a file from another host appears on a shared disk."""
AGENT_END_SECONDS = 10.0
"""Maximum seconds to wait for an agent to end its ranks after the agent's pipe is closed."""
TASK_VARIABLES = (
    *("OMPI_", "PMIX_", "PMI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP"),
)
"""Prefixes of environment variables that make libraries treat a rank as a task of the launcher."""


def run(place: dict[str, Any], kernel: "zmq.Socket[bytes]") -> bool:
    """Run an agent until the agent or the kernel ends; return True if the kernel ever answered.

    See ``Router.place`` for the contents of ``place``.
    """
    name = place["name"] or secrets.token_hex(8)
    folder = parent_folder() / f"{RUN_FOLDER}{name}"
    kernel.identity = name.encode()
    kernel.curve_publickey, kernel.curve_secretkey = zmq.curve_keypair()
    kernel.curve_serverkey = place["key"].encode()
    keep_alive(kernel, place["lost_ms"])
    kernel.reconnect_ivl = -1
    end_of_kernel = kernel.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    kernel.connect(place["endpoint"])
    pipe, theirs = Pipe()
    limit_waits(pipe, read_seconds=PIPE_SECONDS).close()
    agent = subprocess.Popen(
        [sys.executable, "-m", "ddpnb.hosts.agent", str(theirs.fileno()), folder, place["sockets"]],
        stdin=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if not k.startswith(TASK_VARIABLES)},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    try:
        hello = {
            "token": place["token"],
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "reached": address_of_ssh(),
        }
        send_frame(kernel, Word.HELLO, json.dumps(hello).encode())
        return pass_on(pipe, kernel, end_of_kernel)
    finally:
        pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(AGENT_END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(agent.pid, signal.SIGKILL)  # the agent or its remaining processes
        agent.wait()
        shutil.rmtree(folder, ignore_errors=True)
        send_frame(kernel, Word.END)
        kernel.disable_monitor()


def pass_on(
    pipe: Connection, kernel: "zmq.Socket[bytes]", end_of_kernel: "zmq.Socket[bytes]"
) -> bool:
    """Forward frames until the agent or kernel ends.  Return True if the kernel ever answered."""
    is_known, deadline = False, time.monotonic() + COME_MS / 1000
    poller = zmq.Poller()
    for each in (kernel, end_of_kernel, pipe.fileno()):
        poller.register(each, zmq.POLLIN)
    with contextlib.suppress(EOFError, OSError):  # the agent has ended or does not read
        while is_known or time.monotonic() < deadline:
            ready = dict(poller.poll(1000))
            if end_of_kernel in ready:
                break
            if pipe.fileno() in ready:
                send_frame(kernel, Word.FRAME, pipe.recv_bytes())
            if kernel in ready:
                is_known = True
                word, content = kernel.recv_multipart()
                if word == Word.FRAME:
                    pipe.send_bytes(content)
                elif word == Word.END:
                    break
    return is_known


def send_frame(kernel: "zmq.Socket[bytes]", word: Word, content: bytes = b"") -> None:
    """Send the kernel a message; drop the message if the kernel is lost."""
    with contextlib.suppress(zmq.Again):
        kernel.send_multipart([word, content], zmq.NOBLOCK)


def read_place(path: str) -> dict[str, Any]:
    """Return the kernel's address and keys from stdin, or from a file that may appear later."""
    deadline = time.monotonic() + SHARED_SECONDS
    while path and not os.path.exists(path):
        if time.monotonic() > deadline:
            sys.exit(f"the file with keys, {path}, did not appear")
        time.sleep(0.05)
    return dict(json.loads(Path(path).read_text() if path else sys.stdin.readline()))


def main(path: str = "", *_: str) -> None:
    """Run the relay; ignore further arguments, which some launchers add."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    place = read_place(path)
    with zmq.Context() as context, context.socket(zmq.DEALER) as kernel:
        if not run(place, kernel):
            sys.exit(f"no answer at {place['endpoint']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
