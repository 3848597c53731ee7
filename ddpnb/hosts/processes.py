"""The processes of a cluster on several hosts.  Runs in the kernel.

The fork server on the kernel's host starts only the controller.  Each host has an agent and a
relay.  The agent is the fork server of the host's ranks.  The relay connects the agent to the
kernel.  The kernel's host is treated like others.  Two ssh names of one host count as two hosts.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, START_TIMEOUT_SECONDS
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.link import Exit, ForkServerLink
from ddpnb.cluster.placement import ClusterSpec, Host, Placement, place_ranks
from ddpnb.cluster.processes import (
    STOP_TIMEOUT_SECONDS,
    ForkServerProcess,
    LocalProcesses,
    OnExit,
    Processes,
    StartProcesses,
    preload,
    result_of,
    torch_environment,
    wait_for_file,
)
from ddpnb.hosts.launchers import LaunchedHosts
from ddpnb.hosts.network import free_ports, versions
from ddpnb.hosts.router import RemoteHost
from ddpnb.hosts.spec import HostsSpec
from ddpnb.hosts.ssh import SshHosts, silent
from ddpnb.hosts.wire import NUM_SOCKETS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import KernelRequest, working_folder

MAX_CLOCK_SECONDS = 5.0
"""Maximum difference between a host's clock and this host's clock, in seconds."""


def start_cluster(spec: ClusterSpec, progress: Callable[[str], None] = lambda _: None) -> Cluster:
    """Start ranks on this host, or on the hosts that the spec names; see ``Cluster.start``."""
    is_remote = isinstance(spec, HostsSpec) and spec.is_remote
    start_processes: StartProcesses = HostProcesses if is_remote else LocalProcesses
    return Cluster.start(spec, progress, start_processes)


class HostProcesses(Processes):
    """A fork server with the controller on this host, and an agent on each host with ranks."""

    def __init__(self, spec: ClusterSpec, folder: Path, on_exit: OnExit) -> None:
        """Start the controller and the relays; raise UserError if they cannot be started."""
        assert isinstance(spec, HostsSpec)
        preload.stop()
        self._spec = spec
        self._folder = folder
        self._home = working_folder()
        self._on_exit = on_exit
        self._hosts: list[RemoteHost] = []
        self._is_placed = False
        self.prepared = Future()
        self.prepared.set_result(0)  # the agents start the ranks
        self._starter = (LaunchedHosts if spec.is_launched else SshHosts)(spec, folder)
        try:
            address = self._starter.address
            ports = free_ports(address, NUM_SOCKETS) if address else range(1, NUM_SOCKETS + 1)
            self.server = ForkServerProcess(folder, on_exit, {}, address, ports)
        except BaseException:
            self._starter.stop()
            raise

    def place(self, progress: Callable[[str], None]) -> Placement:
        """Wait for the hosts, check them, let their agents import torch, and place the ranks."""
        for host in self._starter.wait(progress):
            self._connect(host)
            self._hosts.append(host)
        progress("checking the hosts")
        self._check(self._hosts)
        self._check_links()
        progress("importing torch")
        self._prepare(self._hosts)
        port = self._hosts[0].report["master_port"]
        names = ("address", "interface", "num_cores", "num_gpus")
        hosts = [
            Host(name=each.name, size=each.size, **{name: each.report[name] for name in names})
            for each in self._hosts
        ]
        self.placement = place_ranks(self._spec, hosts, port)
        self._is_placed = True
        return self.placement

    @property
    def links(self) -> Sequence[ForkServerLink]:
        """The connection to the agent of each host."""
        return [host.link for host in self._hosts]

    def prepare(self, rank: int) -> None:
        """Prepare a rank's host to start the rank; start the agent again if the agent has ended."""
        host = self._hosts[self.placement.host_of[rank]]
        if not host.link.is_over.is_set():
            return
        self._starter.start_again(host)
        self._connect(host)
        try:
            self._check([host])
            self._prepare([host])
        except BaseException:
            host.link.close()
            raise

    def stop(self) -> None:
        """End every process on every host, and wait until all have ended; may be called twice."""
        for host in self._hosts:
            host.link.begin_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for host in self._hosts:
            host.link.is_over.wait(max(0.0, deadline - time.monotonic()))
            host.link.close()
        try:
            self.server.stop()
        finally:
            self._starter.stop()

    def _connect(self, host: RemoteHost) -> None:
        """Connect to a host's agent, and start to read its reports."""
        relay = self._starter.router.relays.get(host.relay)
        if relay is None:
            raise UserError(self._starter.explain(host))
        host.link = ForkServerLink(
            relay.pipe, on_exit=self._on_exit, on_end=lambda: self._note_end(host)
        )

    def _note_end(self, host: RemoteHost) -> None:
        """Report the end of all ranks of a host, because the host's agent has ended."""
        if not self._is_placed:
            return
        cause = f"was lost with host {host.name}: its connection or its agent ended"
        for rank in self.placement.ranks_of(self._hosts.index(host)):
            self._on_exit(Exit(member=rank, code=None, cause=cause))

    def _ask(
        self,
        hosts: Sequence[RemoteHost],
        operation: KernelRequest,
        seconds: float = CALL_TIMEOUT_SECONDS,
        /,
        **fields: object,
    ) -> list[Any]:
        """Send a request to all agents at the same time; return the answer of each agent."""
        asked = [host.link.request(operation, **fields) for host in hosts]
        return [self._result(*pair, seconds) for pair in zip(hosts, asked, strict=True)]

    def _result(self, host: RemoteHost, answer: "Future[Any]", seconds: float) -> Any:
        """Wait for an agent's answer; raise UserError if the agent does not answer."""
        try:
            return result_of(answer, seconds)
        except TimeoutError:
            raise UserError(silent(host.name, seconds)) from None
        except RuntimeError as error:
            if host.link.is_over.is_set():
                raise UserError(self._starter.explain(host)) from None
            raise UserError(f"Host {host.name} cannot be used: {error}") from error

    def _check(self, hosts: Sequence[RemoteHost]) -> None:
        """Ask agents to describe their hosts; raise UserError if a host cannot be used."""
        interface = self._spec.interface
        others = [relay.reached for relay in [*self._starter.router.relays.values()]]
        others += [self._starter.address] if self._starter.address else []
        question = {"home": str(self._home), "interface": interface, "others": others}
        port = self.placement.master_port if self._is_placed else 0
        for host in hosts:
            own_port = port if host is self._hosts[0] else None
            [report] = self._ask([host], KernelRequest.CHECK, **question, port=own_port)
            host.report = report | {"clock": report["clock"] - time.time()}
        for host in hosts:
            check_host(host, self._home, interface)

    def _prepare(self, hosts: Sequence[RemoteHost]) -> None:
        """Let agents import torch, and send them the connection file of the controller."""
        path = self._folder / "profile/security/ipcontroller-engine.json"
        wait_for_file(path, self._require_controller)
        fields = {"environment": torch_environment(), "connection": json.loads(path.read_text())}
        found = self._ask(hosts, KernelRequest.PREPARE, START_TIMEOUT_SECONDS, **fields)
        for host, num_gpus in zip(hosts, found, strict=True):
            host.report["num_gpus"] = num_gpus

    def _check_links(self) -> None:
        """Raise UserError unless each host can reach every other host."""
        hosts = self._hosts
        where = [(host.report["address"], host.report["port"]) for host in hosts]
        found = self._ask(hosts, KernelRequest.PROBE, others=where)
        for host, failed in zip(hosts, found, strict=True):
            if failed is not None:
                number, error = failed
                raise UserError(
                    f"Host {host.name} cannot reach host {hosts[number].name} at the address "
                    f"{where[number][0]} ({error.lower()}). Open the ports between the hosts, or "
                    "choose another network with --interface."
                )

    def _require_controller(self) -> None:
        if self.server.link.is_over.is_set():
            raise RuntimeError("the fork server ended while the controller was starting")


def check_host(host: RemoteHost, home: Path, interface: str) -> None:
    """Raise UserError if a host cannot be used."""
    name, report = host.name, host.report
    for package, here in versions().items():
        there = report["versions"][package] or "none"
        if there != here:
            raise UserError(
                f"Host {name} has {package} {there}, but this host has {here}. Install the same "
                "version, or choose another Python with --python."
            )
    if not report["has_home"]:
        raise UserError(f"Host {name} has no folder {home}, which cells need. Create the folder.")
    if abs(off := report["clock"]) > MAX_CLOCK_SECONDS:
        raise UserError(f"The clock of host {name} is off by {off:+.0f} s. Run NTP on both hosts.")
    if interface and not report["address"]:
        known = ", ".join(report["interfaces"])
        raise UserError(f"Host {name} has no interface {interface} with IPv4. Choose from {known}.")
