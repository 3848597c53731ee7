"""Which TCP connections do processes of this host have?  (fork server; ranks, for their own)

Two ranks are connected where each has a connection that is the other's turned round.  Gloo connects
each rank with each other one, so the system's list is as long as the square of their number.  It is
read once for all ranks.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import psutil


class Address(NamedTuple):
    """One end of a connection."""

    ip: str
    port: int


class TcpConnection(NamedTuple):
    """A connection as one of its processes sees it."""

    fd: int
    laddr: Address
    """This process's end."""
    raddr: Address
    """The other end."""


Ends = tuple[Address, Address]
"""A connection's own end and its other end."""


def ends_of(pids: Collection[int]) -> dict[int, set[Ends]]:
    """Return the ends of all connections of some processes of this user, by process."""
    found: dict[int, set[Ends]] = {pid: set() for pid in pids}
    for pid, each in _listed(pids):
        if each.raddr and pid in found:
            found[pid].add((_address(each.laddr), _address(each.raddr)))
    return found


def _listed(pids: Collection[int]) -> Iterator[tuple[int, Any]]:
    if psutil.LINUX:  # elsewhere only root may list all; here each process costs the whole list
        yield from ((each.pid, each) for each in psutil.net_connections("tcp"))
        return
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            yield from ((pid, each) for each in psutil.Process(pid).net_connections("tcp"))


def own_connections() -> Iterator[TcpConnection]:
    """Yield the open TCP connections of this process, without the system's list."""
    folder = "/proc/self/fd" if psutil.LINUX else "/dev/fd"
    for fd in sorted(map(int, os.listdir(folder))):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as end:
                is_ip = end.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and end.type == socket.SOCK_STREAM:
                    own, other = _address(end.getsockname()), _address(end.getpeername())
                    yield TcpConnection(fd, own, other)


def _address(address: Any) -> Address:
    ip, port = address[:2]
    return Address(ip.removeprefix("::ffff:"), port)  # an IPv4 address of an IPv6 socket
