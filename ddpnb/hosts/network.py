"""Addresses, ports and software of this host; whether it reaches others (kernel, agents)."""

import contextlib
import importlib.metadata
import ipaddress
import os
import platform
import random
import socket
from collections.abc import Sequence

import psutil

from ddpnb.protocol.processes import ephemeral_ports

PROBE_SECONDS = 3.0
"""How long a connection to another host may take."""


def versions() -> dict[str, str]:
    """Return the versions that all hosts share, without importing anything; empty: none is here."""
    found = {"Python": platform.python_version().rpartition(".")[0]}
    for package in ("ddpnb", "torch"):
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each network interface."""
    return {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }


def address_of_ssh() -> str:
    """Return the one of this host's addresses by which ssh has reached it, if it has."""
    parts = os.environ.get("SSH_CONNECTION", "").split()  # in a batch job it may be another host's
    address = parts[2].removeprefix("::ffff:") if len(parts) == 4 else ""
    is_own = any(address in found for found in interfaces().values())
    return address if is_own else "127.0.0.1"


def route_to(address: str) -> str:
    """Return the address of this host on the way to another; empty where there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address is of use on its own host only."""
    return ipaddress.ip_address(address or "127.0.0.1").is_loopback


def reserve_port(address: str, port: int = 0) -> socket.socket:
    """Keep a port, by default any free one, from being handed out, until the socket is closed.

    A process that asks for it by number, with SO_REUSEADDR, may listen there.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((address, port))
    return kept


def free_ports(address: str, num: int) -> list[int]:
    """Return free ports of an address, of those that the system does not hand out by itself.

    So none is taken before the controller listens, and ``Group.abort``, which closes connections
    between ranks, can distinguish them from those to the controller.
    """
    every, others = range(10_000, 65_536), ephemeral_ports()
    candidates = [port for port in every if port not in others] or list(every)
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            found.append(port)
        if len(found) == num:
            return found
    raise OSError(f"there are no {num} free ports at {address}")


def probe(others: Sequence[tuple[str, int]]) -> tuple[int, str] | None:
    """Connect to addresses; return the number of the first that fails, and its error."""
    for number, address in enumerate(others):
        try:
            socket.create_connection(address, PROBE_SECONDS).close()
        except TimeoutError:
            return number, f"no answer within {PROBE_SECONDS:g} s"
        except OSError as error:
            return number, os.strerror(error.errno or 0)
    return None
