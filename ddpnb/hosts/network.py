"""Finds this host's ports and versions; probes other hosts.  Runs in the kernel and in agents."""

import contextlib
import ipaddress
import os
import platform
import random
import socket
from collections.abc import Sequence

import psutil

from ddpnb.compat.probe import version_of
from ddpnb.protocol.processes import ephemeral_ports

PORT_SECONDS = 3.0
"""Maximum seconds to wait for a connection to another host."""


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts; ``""`` for a missing package."""
    found = {"Python": platform.python_version().rpartition(".")[0]}
    return found | {name: version_of(name).partition("+")[0] for name in ("ddpnb", "torch")}


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each network interface."""
    return {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }


def address_of_ssh() -> str:
    """Return the address over which ssh reached this host; without ssh, the loopback address."""
    parts = os.environ.get("SSH_CONNECTION", "").split()  # a batch job may inherit it
    address = parts[2].removeprefix("::ffff:") if len(parts) == 4 else ""
    is_own = any(address in found for found in interfaces().values())
    return address if is_own else "127.0.0.1"


def route_to(address: str) -> str:
    """Return the address from which this host reaches another address; empty if unreachable."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Return True if an address works only within its host."""
    return ipaddress.ip_address(address or "127.0.0.1").is_loopback


def reserve_port(address: str, port: int = 0) -> socket.socket:
    """Reserve a port, by default any free port, until the returned socket is closed.

    Another process can still listen at the port if it names the port and sets SO_REUSEADDR.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((address, port))
    return kept


def free_ports(address: str, num: int) -> list[int]:
    """Return free ports of an address, without the ports that the system assigns automatically.

    So the ports stay free until the controller listens.  ``Group.abort`` recognizes connections to
    the controller by these ports, and closes all other connections.
    """
    every, others = range(10_000, 65_536), ephemeral_ports()
    candidates = [port for port in every if port not in others] or list(every)
    random.Random().shuffle(candidates)  # without the user's seed
    found: list[int] = []
    for port in candidates:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            found.append(port)
        if len(found) == num:
            return found
    raise OSError(f"there are no {num} free ports at {address}")


def probe(others: Sequence[tuple[str, int]]) -> tuple[int, str] | None:
    """Connect to addresses; return the first failure's index and error, or None if all answer."""
    for number, address in enumerate(others):
        try:
            socket.create_connection(address, PORT_SECONDS).close()
        except TimeoutError:
            return number, f"no answer within {PORT_SECONDS:g} s"
        except OSError as error:
            return number, os.strerror(error.errno or 0)
    return None
