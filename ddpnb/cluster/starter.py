"""What the ways to start agents have in common (kernel)."""

import abc
import random
import socket
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from ddpnb.cluster.ssh import explain
from ddpnb.protocol.errors import UserError

Started = tuple[subprocess.Popen[bytes], Connection]


class AgentStarter(abc.ABC):
    """Where agents are started, and how."""

    hosts: str = ""
    """The hosts, each with its number of ranks, as ``parse_hosts`` reads them."""
    address: str = ""
    """Of this host, where the engines reach the controller; empty: at forwarded sockets."""

    @abc.abstractmethod
    def start(
        self, host: str, token: str, *, python: str, sockets: Sequence[Path], log: Path
    ) -> Started:
        """Start a host's agent; see ``ssh.start_agent``."""

    def explain(self, host: str, code: int | None, log: Path, version: str) -> str:
        """Return the sentence on why a host's agent did not start."""
        return explain(host, code, log, version)

    def ended(self) -> str:
        """Say why all the hosts are lost at once; empty if they are not."""
        return ""

    def stop(self) -> None:  # noqa: B027  not abstract: there may be nothing to give back
        """Give the hosts back; may be called twice."""


def own_address(interface: str, hosts: Sequence[str]) -> str:
    """Return this host's address on the way to the hosts, or that of an interface.

    Raises:
        UserError: there is no such interface or way.
    """
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        if address := next((each.address for each in found if each.family == socket.AF_INET), ""):
            return address
        raise UserError(
            f"This host has no interface {interface} with an IPv4 address; --interface names one "
            "that this host and all others have."
        )
    addresses = []
    for host in hosts:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
                way.connect((socket.gethostbyname(host), 9))  # sends nothing
                addresses.append(str(way.getsockname()[0]))
        except OSError as error:
            raise UserError(
                f"Host {host} has no address that is known here ({error}): give its address in "
                "place of a name of ~/.ssh/config, or add it to /etc/hosts."
            ) from error
    return next((each for each in addresses if not each.startswith("127.")), addresses[0])


def free_ports(address: str, num: int) -> list[int]:
    """Return free ports of an address, of those that the system does not hand out by itself.

    So none is taken before the controller listens, and ``Group.abort``, which closes connections
    between ranks, can distinguish them from those to the controller.
    """
    first, last = 32_768, 60_999
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if path.exists():
        first, last = map(int, path.read_text().split())
    candidates = [*range(10_000, first), *range(last + 1, 65_536)] or list(range(10_000, 65_536))
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == num:
            return found
    raise UserError(f"There are no free ports at {address}.")
