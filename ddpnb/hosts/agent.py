"""The agent of a host, which is the fork server of the host's ranks.  Runs in the agent.

The relay of the host starts the agent and sends it the kernel's JSON frames.  Before the agent
imports torch, it reports the host's properties and whether the host can reach the other hosts.
When the agent's pipe closes, the agent ends all its ranks, as every fork server does.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddpnb.forkserver.server import ForkServer, preload_modules
from ddpnb.hosts.network import (
    address_of_ssh,
    interfaces,
    is_loopback,
    probe,
    reserve_port,
    route_to,
    versions,
)
from ddpnb.hosts.wire import NUM_SOCKETS
from ddpnb.protocol.cores import num_cores
from ddpnb.protocol.processes import KernelRequest, atomic_write


@dataclass(kw_only=True, slots=True)
class Agent:
    """Answers the requests that only an agent answers.  ``server`` answers all other requests."""

    server: ForkServer
    sockets: str
    """Path prefix of the controller's sockets that ssh forwards, or empty if there are none."""
    listener: socket.socket | None = None
    """The socket to which other hosts connect, to check that they can reach this host."""
    master: socket.socket | None = None
    """The socket that reserves the port for rank 0; None if rank 0 is on another host."""

    def check(
        self, *, home: str, interface: str, others: list[str], port: int | None
    ) -> dict[str, Any]:
        """Describe this host, and open a port that the other hosts probe.

        Without an ``interface``, ddpnb uses the network over which ssh reached this host.  On the
        kernel's own host, ddpnb uses the network that leads to ``others``.  The agent reserves
        ``port`` for rank 0.  0 means any free port.  None means that rank 0 is on another host.
        """
        known = interfaces()
        address = next(iter(known.get(interface, [])), "") if interface else address_of_ssh()
        if not interface and is_loopback(address):
            far = [route_to(each) for each in others if not is_loopback(each)]
            address = next(filter(None, far), address)
        if address:
            self.listener = socket.create_server((address, 0))
            self.listener.setblocking(False)  # a client may disconnect before `accept`
            self.master = None if port is None else reserve_port(address, port)
            self.server.more_ends += filter(None, (self.listener, self.master))
            self.server.selector.register(self.listener, selectors.EVENT_READ, refuse_connection)
        return {
            "versions": versions(),
            "has_home": os.path.isdir(home),
            "num_cores": num_cores(),
            "clock": time.time(),
            "address": address,
            "interface": next((n for n, found in known.items() if address in found), ""),
            "interfaces": sorted(known),
            "port": self.listener.getsockname()[1] if self.listener else 0,
            "master_port": self.master.getsockname()[1] if self.master else 0,
        }

    def prepare(self, *, environment: dict[str, str], connection: dict[str, Any]) -> int:
        """Write the engines' connection file, import torch, and return the number of GPUs.

        Torch reads ``environment``.  Links give ssh's sockets the names that ipyparallel expects.
        """
        profile = self.server.folder / "profile"
        (profile / "security").mkdir(parents=True)
        if self.sockets:
            connection["interface"] = f"ipc://{profile / 'socket'}"
            for n in range(1, NUM_SOCKETS + 1):
                (profile / f"socket:{n}").symlink_to(f"{self.sockets}.{n}")
        path = profile / "security/ipcontroller-engine.json"
        atomic_write(path, json.dumps(connection).encode(), mode=0o600)
        os.environ.update(environment)
        return preload_modules()


def refuse_connection(listener: socket.socket) -> None:
    """Accept a connection and close it; the probing host only checks that it can connect."""
    with contextlib.suppress(OSError):
        listener.accept()[0].close()


def main(kernel_fd: str, folder: str, sockets: str) -> None:
    """Run the agent for the kernel at the other end of the relay's pipe."""
    server = ForkServer(kernel=Connection(int(kernel_fd)), folder=Path(folder))
    server.folder.mkdir(mode=0o700)
    agent = Agent(server=server, sockets=sockets)
    server.handlers |= {
        KernelRequest.CHECK: agent.check,
        KernelRequest.PROBE: probe,
        KernelRequest.PREPARE: agent.prepare,
    }
    server.run([])


if __name__ == "__main__":
    main(*sys.argv[1:])
