"""This host's ends of the ways to agents that ssh did not start (kernel): ``launcher/tunnel.py``.

Slurm, MPI and other launchers start a program on a host that comes back here, over CurveZMQ, and is
given an agent's script.  A process here, one for each, passes on what goes there and comes back.
"""

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from ddpnb.cluster.ssh import CHOOSE_PYTHON, agent_script, connected
from ddpnb.cluster.starter import Started, free_ports
from ddpnb.protocol.processes import KernelRequest, atomic_write

END_SECONDS = 5.0

COME = CHOOSE_PYTHON + 'exec "$python" -m ddpnb.launcher.tunnel come {file}\n'


@dataclass(kw_only=True, slots=True)
class Tunnel:
    """The process here that passes on what comes from a host, and goes there."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    arrived: Path
    """Appears when the host has come, and holds its name."""

    @property
    def host(self) -> str:
        """What the host is called; empty before it has come."""
        return self.arrived.read_text() if self.arrived.exists() else ""

    def run(self, script: str) -> Started:
        """Have the host run a script, once it has come; return the pipe to it."""
        frame = {"op": KernelRequest.RUN, "script": script}
        with contextlib.suppress(OSError):  # it is lost again, as the pipe's other end says
            self.pipe.send_bytes(json.dumps(frame).encode())
        return self.process, self.pipe

    def end(self) -> None:
        """End the process, and with it what runs at the other end; may be called twice."""
        self.pipe.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Tunnels:
    """Makes them, at an address of this host; all have the same keys.

    A file in the user's home, which the other hosts share, has what one needs to come here.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._folder = folder
        self._files: list[Path] = []
        self._server, self._client = (
            [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
        )

    def start_agent(
        self,
        command: Sequence[str],
        token: str,
        *,
        python: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        kept_open: int | None = None,
    ) -> Started:
        """Start an agent by a command that runs what follows it on the agent's host."""
        ports = free_ports(self._address, 1)
        file = self.write_file(ports, is_once=True)
        come = COME.format(
            python=shlex.quote(python),
            same=shlex.quote(sys.executable),
            file=shlex.quote(str(file)),
        )
        tunnel = self.open(
            ports[0],
            log,
            command=[*command, "sh", "-c", come],
            file=file,
            environment=environment,
            kept_open=kept_open,
        )
        return tunnel.run(agent_script(token, python))

    def write_file(self, ports: Sequence[int], *, is_once: bool) -> Path:
        """Write what hosts need to come; return the file.

        Args:
            ports: a host comes to the first that no other one has come to.
            is_once: whether it comes only once, and not again when its agent has ended.
        """
        file = Path.home() / f".ddpnb-{secrets.token_hex(8)}.json"
        content = {
            "address": self._address,
            "ports": ports,
            "server": self._server[0],
            "client": self._client,
            "is_once": is_once,
        }
        self._files.append(file)
        atomic_write(file, json.dumps(content).encode(), mode=0o600)
        return file

    def remove_files(self) -> None:
        """Remove what no host has come by; may be called twice."""
        for file in self._files:
            file.unlink(missing_ok=True)

    def open(
        self,
        port: int,
        log: Path,
        *,
        command: Sequence[str] = (),
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        kept_open: int | None = None,
    ) -> Tunnel:
        """Wait for a host at a port, in a process of its own.

        Args:
            port: of the address.
            log: what the host's agent writes to its stderr.
            command: what has the host come, if anything; it ends with the process.
            file: what the process removes once the host has come.
            environment: of the process and the command; by default this process's.
            kept_open: see ``ssh.connected``.
        """
        place = self._folder / f"tunnel-{port}.json"
        arrived = place.with_suffix(".txt")
        arrived.unlink(missing_ok=True)
        content = {
            "address": self._address,
            "port": port,
            "server": self._server,
            "client": self._client[:1],
            "arrived": str(arrived),
            "log": str(log),
            "command": command,
            "remove": str(file or ""),
        }
        atomic_write(place, json.dumps(content).encode(), mode=0o600)
        program = [sys.executable, "-m", "ddpnb.launcher.tunnel", "serve", str(place)]
        process, pipe = connected(program, log, environment, kept_open)
        return Tunnel(process=process, pipe=pipe, arrived=arrived)
