"""The agent of a host: the fork server of the ranks there (agent).

The relay of its host starts it, and passes the kernel's JSON frames on to it.  Before it imports
torch, it reports what this host has and whether it reaches the other hosts.  When its pipe closes,
it ends all its ranks, like any fork server.
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
from ddpnb.launcher import forkserver
from ddpnb.protocol.processes import KernelRequest, atomic_write, num_cores


@dataclass(kw_only=True, slots=True)
class Agent:
    """What an agent does that a fork server on the kernel's own host need not."""

    server: forkserver.Forkserver
    sockets: str
    """Where ssh has forwarded the controller's to, less their numbers; empty: nowhere."""
    listener: socket.socket | None = None
    """Where other hosts probe whether they reach this one."""
    master: socket.socket | None = None
    """Keeps the port at which rank 0, if it is here, will listen."""

    def check(
        self, *, home: str, interface: str, others: list[str], port: int | None
    ) -> dict[str, Any]:
        """Describe this host, and let the other hosts probe it.

        Without an ``interface`` the network between the hosts is that by which ssh came here, or,
        on the kernel's own host, that which leads to ``others``.  ``port`` is kept for rank 0; 0
        stands for any, None for none: rank 0 is elsewhere.
        """
        known = interfaces()
        address = next(iter(known.get(interface, [])), "") if interface else address_of_ssh()
        if not interface and is_loopback(address):
            far = [route_to(each) for each in others if not is_loopback(each)]
            address = next(filter(None, far), address)
        if address:
            self.listener = socket.create_server((address, 0))
            self.listener.setblocking(False)  # who has connected may be gone
            self.master = None if port is None else reserve_port(address, port)
            self.server.more_ends += filter(None, (self.listener, self.master))
            self.server.selector.register(self.listener, selectors.EVENT_READ, refuse)
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
        """Write the engines' connection file; import torch; return the number of GPUs.

        Torch finds this environment.  Forwarded sockets get the names that the file gives them.
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
        return forkserver.preload()


def refuse(listener: socket.socket) -> None:
    """Close what connects to the listener: that it could is all there is to know."""
    with contextlib.suppress(OSError):
        listener.accept()[0].close()


def main(kernel_fd: str, folder: str, sockets: str) -> None:
    """Be the agent of the kernel to which the relay's pipe leads."""
    server = forkserver.Forkserver(kernel=Connection(int(kernel_fd)), folder=Path(folder))
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
