"""Finds, counts and closes the TCP connections of this host's processes.  Runs on the ranks.

Two ranks are connected if each rank has a connection with the same two ends, in opposite order.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import psutil

from ddpnb.protocol.processes import as_socket, portable

UNREAD_SECONDS: Final = 1.0
"""Maximum time in seconds that ``bytes_sent`` waits for bytes that are under way."""


Address = tuple[str, int]
"""The IP address and the port of one end of a TCP connection."""
Ends = tuple[Address, Address]
"""Both ends of a connection: first this process's address, then the other process's address."""


def ends_of(pids: Collection[int]) -> set[Ends]:
    """Return both ends of each TCP connection that the given processes of this user have open."""
    if portable():
        return {ends for pid in pids for ends in _ends_by_psutil(pid)}
    connections = _connections_by_inode()
    return {connections[each] for pid in pids for each in _inodes(pid) if each in connections}


def _ends_by_psutil(pid: int) -> Iterator[Ends]:
    """Yield both ends of a process's connections.  On Linux, this is slow with many ranks."""
    with contextlib.suppress(psutil.Error):  # the process has ended
        process = psutil.Process(pid)
        look: Any = getattr(process, "net_connections", None) or process.connections  # before 6.0
        for each in look("tcp"):
            if each.raddr:
                yield _address(each.laddr), _address(each.raddr)


def _inodes(pid: int) -> set[str]:
    """Return the inode numbers of all sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):  # the process has ended
        for each in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the file has been closed meanwhile
                if (target := os.readlink(each.path)).startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def _connections_by_inode() -> dict[str, Ends]:
    """Return a dict that maps the inode number of each TCP socket to both ends of its connection.

    psutil would give only one process per connection, but the ``DataLoader`` workers of a rank
    share the rank's sockets.
    """
    found: dict[str, Ends] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):  # no IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                ends = _read_address(fields[1], family), _read_address(fields[2], family)
                found[fields[9]] = ends
    return found


@lru_cache(maxsize=65536)
def _read_address(text: str, family: socket.AddressFamily) -> Address:
    """Parse an address of 32-bit words, in the machine's byte order, from ``/proc/net/tcp``."""
    ip, port = text.split(":")
    words = [int(ip[at : at + 8], 16) for at in range(0, len(ip), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _address((socket.inet_ntop(family, packed), int(port, 16)))


def own_connections() -> Iterator[tuple[int, Ends]]:
    """Yield the descriptor and both ends of each TCP connection that this process has open."""
    for fd in sorted(map(int, os.listdir("/dev/fd"))):
        # The file may have been closed, may not be a socket, or may not be connected.
        with contextlib.suppress(OSError), as_socket(fd) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                yield fd, (_address(end.getsockname()), _address(end.getpeername()))


def shut_down(fd: int, how: int = socket.SHUT_RDWR) -> bool:
    """End all waits at a socket without closing it.  Return True if the socket was connected."""
    try:
        with as_socket(fd) as end:
            end.shutdown(how)
    except OSError:  # closed meanwhile or not connected, so no thread waits there
        return False
    return True


def traffic_of(fd: int) -> tuple[int, int, int] | None:
    """Return how many bytes a TCP connection has acknowledged, received and not yet transferred.

    Return None if the system does not report these numbers.
    """
    if portable():
        return None
    with contextlib.suppress(OSError, struct.error), as_socket(fd) as end:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        num_unacked, acked, received, unsent = _TCP_INFO.unpack(info)
        return acked, received, num_unacked + unsent
    return None


def bytes_sent() -> int | None:
    """Return the number of bytes that this process has sent through TCP; None if unknown.

    This function waits up to ``UNREAD_SECONDS`` for bytes that are under way.
    """
    deadline = time.monotonic() + UNREAD_SECONDS
    while True:
        sockets = {ends: fd for fd, ends in own_connections()}  # no duplicates
        found = [each for fd in sockets.values() if (each := traffic_of(fd))]
        if sockets and not found:
            return None
        if not any(left for *_, left in found) or time.monotonic() > deadline:
            return sum(acked for acked, *_ in found)
        time.sleep(0.001)


_TCP_INFO: Final = struct.Struct("=24xI92xQQ8xI")
"""Four fields of Linux's ``tcp_info``: ``tcpi_unacked``, ``tcpi_bytes_acked``,
``tcpi_bytes_received`` and ``tcpi_notsent_bytes``."""


def _address(address: Any) -> Address:
    ip, port = address[:2]
    return ip.removeprefix("::ffff:"), port  # prefix of IPv4 addresses in IPv6 sockets
