"""The agent of a host: the fork server there, at the far end of an ssh connection (agent).

The kernel starts ``python -m ddpnb.launcher.agent TOKEN`` through ssh, and exchanges the fork
server's JSON frames with it over that connection, which is its standard input and output.  Before
it imports torch, it reports what this host has and whether it reaches the other hosts.  When the
connection ends, or nothing comes for a while, it ends all its ranks, like any fork server.

The engines connect to Unix sockets of this host, which ssh forwards to the controller's: nothing of
ipyparallel listens on a network.
"""

import contextlib
import errno
import importlib.metadata
import ipaddress
import json
import os
import platform
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ddpnb.protocol.processes import (
    AGENT_GREETING,
    SERVER_LOCK,
    ForkServerEvent,
    KernelRequest,
    atomic_write,
    hold,
    num_cores,
)

SILENCE_SECONDS = 30.0
"""How long the kernel, which reports every few seconds, may be silent."""
TASK_VARIABLES = (
    *("OMPI_", "PMIX_", "PMI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP"),
)
"""Variables, or their beginnings, by which libraries would take a rank for the launcher's task."""
PROBE_SECONDS = 3.0
"""How long a connection to another host may take."""

Frame = dict[str, Any]


class StandardPipe:
    """This process's standard input and output as one pipe; prints then go to its stderr."""

    def __init__(self) -> None:
        self._input = Connection(os.dup(0), writable=False)
        self._output = Connection(os.dup(1), readable=False)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        os.write(self._output.fileno(), AGENT_GREETING)

    def fileno(self) -> int:
        """Return the descriptor to read from."""
        return self._input.fileno()

    def poll(self, seconds: float) -> bool:
        """Return whether a message, or the end, has come within so many seconds."""
        return self._input.poll(seconds)

    def recv_bytes(self) -> bytes:
        """Return the next message."""
        return self._input.recv_bytes()

    def send_bytes(self, buf: bytes) -> None:
        """Send a message."""
        self._output.send_bytes(buf)

    def close(self) -> None:
        """Close both directions."""
        self._input.close()
        self._output.close()


@dataclass(kw_only=True, slots=True)
class Agent:
    """What the agent does that a fork server on the kernel's own host need not."""

    kernel: StandardPipe
    token: str
    """A part of the names of this host's files."""
    folder: Path
    listener: socket.socket | None = None
    """Where other hosts probe whether they reach this one."""
    environment: dict[str, str] = field(default_factory=dict)

    def answer(self, request_id: int, value: object) -> None:
        """Answer a request."""
        frame = {"event": ForkServerEvent.ANSWER, "id": request_id, "value": value}
        self.kernel.send_bytes(json.dumps(frame).encode())

    def check(self, *, id: int, home: str, interface: str, others: list[str]) -> None:
        """Describe this host; ``others`` are the addresses by which ssh reached the other hosts."""
        interfaces = {
            name: [each.address for each in found if each.family == socket.AF_INET]
            for name, found in psutil.net_if_addrs().items()
        }
        address = next(iter(interfaces.get(interface, [])), "") if interface else own_address()
        reached = address
        if not interface and ipaddress.ip_address(address or "127.0.0.1").is_loopback:
            far = [each for each in others if not ipaddress.ip_address(each).is_loopback]
            address = next((route_to(each) for each in far if route_to(each)), address)
        if address and (self.listener is None or self.listener.getsockname()[0] != address):
            self.listener = socket.create_server((address, 0))
            self.listener.setblocking(False)  # who has connected may be gone
        self.answer(
            id,
            {
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "torch": version_of("torch"),
                "ddpnb": version_of("ddpnb"),
                "has_home": os.path.isdir(home),
                "num_cores": num_cores(),
                "clock": time.time(),
                "reached": reached,
                "address": address,
                "interface": next((n for n, found in interfaces.items() if address in found), ""),
                "interfaces": sorted(interfaces),
                "port": self.listener.getsockname()[1] if self.listener else 0,
                "free_port": free_port(address) if address else 0,
                "folder": str(self.folder),
            },
        )

    def probe(self, *, id: int, others: dict[str, tuple[str, int]]) -> None:
        """Report the error of connecting to each of the ``others``; empty where it works."""
        self.answer(id, probe(others))

    def connect(self, *, id: int, connection: Frame, sockets: list[str]) -> None:
        """Write the engines' connection file, and name the forwarded sockets as it does.

        ``sockets`` has the last part of the name of each of the controller's sockets; without
        them, engines use its ports.
        """
        profile = self.folder / "profile"
        (profile / "security").mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(sockets):
            link = profile / f"socket{name}"
            link.unlink(missing_ok=True)
            link.symlink_to(forwarded_socket(self.token, number))
        if sockets:
            connection["interface"] = f"ipc://{profile / 'socket'}"
        path = profile / "security/ipcontroller-engine.json"
        atomic_write(path, json.dumps(connection).encode(), mode=0o600)
        self.answer(id, None)

    def prepare(self, *, environment: dict[str, str]) -> None:
        """Note what torch is to find in the environment."""
        self.environment = environment

    def wait_until_prepared(self) -> bool:
        """Serve the kernel's first requests; return whether to go on."""
        handlers: dict[KernelRequest, Callable[..., None]] = {
            KernelRequest.CHECK: self.check,
            KernelRequest.PROBE: self.probe,
            KernelRequest.PREPARE: self.prepare,
            # and what is asked of all hosts while this one is started anew, without ranks
            KernelRequest.SIGNAL: lambda signal_id, **_: self.answer(signal_id, None),
        }
        while not self.environment:
            if not self.kernel.poll(SILENCE_SECONDS):
                return False
            try:
                request: Frame = json.loads(self.kernel.recv_bytes())
            except (EOFError, OSError):
                return False
            operation = KernelRequest(request.pop("op"))
            if operation is KernelRequest.STOP:
                return False
            if (handler := handlers.get(operation)) is not None:
                handler(**request)
        return True


def own_address() -> str:
    """Return the address by which ssh has reached this host."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    address = parts[2].removeprefix("::ffff:") if len(parts) == 4 else "127.0.0.1"
    try:
        is_usable = ipaddress.ip_address(address).version == 4
    except ValueError:
        is_usable = False
    return address if is_usable else "127.0.0.1"


def route_to(address: str) -> str:
    """Return the address of this host on the way to another; empty where there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def probe(others: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Connect to all addresses at once; return the error of each, empty where it worked."""
    found = dict.fromkeys(others, f"no answer within {PROBE_SECONDS:g} s")
    deadline = time.monotonic() + PROBE_SECONDS
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for name, (address, port) in others.items():
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            try:
                code = connection.connect_ex((address, port))
            except OSError as error:
                code = error.errno or 0
            if code in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE, name)
            else:
                found[name] = os.strerror(code)
        while selector.get_map() and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                assert isinstance(key.fileobj, socket.socket)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[key.data] = os.strerror(code) if code else ""
                selector.unregister(key.fileobj)
    return found


def free_port(address: str) -> int:
    """Return a free port of an address."""
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


def version_of(package: str) -> str:
    """Return a package's version without importing it; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def forwarded_socket(token: str, number: int) -> Path:
    """Return where ssh puts the forwarded socket of a number: a folder that every host has."""
    return Path(f"/tmp/ddpnb-{token}.{number}")


def run_folder(token: str) -> Path:
    """Make this host's run folder, closed to other users."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    folder = Path(parent) / f"ddpnb-{token}"
    folder.mkdir(mode=0o700)
    return folder


def main(token: str) -> None:
    """Be the agent of the kernel at the other end of the ssh connection."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # what this process ends with itself is its process group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in [each for each in os.environ if each.startswith(TASK_VARIABLES)]:
        del os.environ[name]
    agent = Agent(kernel=StandardPipe(), token=token, folder=run_folder(token))
    lock = hold(agent.folder / SERVER_LOCK)
    from ddpnb.launcher import forkserver  # noqa: PLC0415  what it imports would delay the greeting

    server = forkserver.Forkserver(
        kernel=agent.kernel,
        folder=agent.folder,
        method="fork",
        more_ends=[lock],
        silence_seconds=SILENCE_SECONDS,
        more_requests={
            KernelRequest.PROBE: agent.probe,
            KernelRequest.CONNECT: agent.connect,
        },
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if agent.wait_until_prepared():
            os.environ.update(agent.environment)
            forkserver.preload()
            server.report(event=ForkServerEvent.READY, gpus=forkserver.describe_gpus())
            if agent.listener is not None:
                server.more_ends.append(agent.listener)
                server.selector.register(agent.listener, selectors.EVENT_READ, refuse)
            server.serve()
    except Exception:  # noqa: BLE001  the edge of the process: the kernel shows the cause
        server.report(event=ForkServerEvent.FAILED, cause=traceback.format_exc())
    finally:
        server.stop()


def refuse(listener: socket.socket) -> None:
    """Close what connects to the listener: that it could is all there is to know."""
    with contextlib.suppress(OSError):
        listener.accept()[0].close()


if __name__ == "__main__":
    main(sys.argv[1])
