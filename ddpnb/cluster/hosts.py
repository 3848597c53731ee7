"""The processes of a cluster on several hosts, with the interface of ``Processes`` (kernel).

The kernel's own host has a fork server with the controller alone.  Each other host has an agent,
which is the fork server of its ranks.  A host that is named twice in ssh's configuration, or is the
kernel's own, is one like any other.
"""

import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpnb.cluster.agents import AgentProcesses
from ddpnb.cluster.allocation import starter_for
from ddpnb.cluster.placement import (
    ClusterSpec,
    HostReport,
    Placement,
    controller_arguments,
    parse_hosts,
    place_on_hosts,
)
from ddpnb.cluster.processes import (
    RECORDED_CALLS,
    Event,
    Exit,
    Member,
    Processes,
    Service,
)
from ddpnb.cluster.ssh import unfit
from ddpnb.cluster.starter import AgentStarter, free_ports
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import KernelRequest, RankCommand

PREPARE_SECONDS = 120.0
"""How long a host may take to import torch."""
NUM_SOCKETS = 12
"""Sockets or ports for the controller to choose from; ipyparallel has eight for engines."""


class HostProcesses(Processes):
    """A fork server with the controller on this host, and the agents of the others."""

    def __init__(
        self, local: Processes, starter: AgentStarter, spec: ClusterSpec, folder: Path, home: Path
    ) -> None:
        self._local = local
        self._starter = starter
        self.ready = local.ready
        self._spec = spec
        self._folder = folder
        self._home = home
        self._agents: dict[int, AgentProcesses] = {}
        self._placement: Placement | None = None
        self._environment: dict[str, str] = {}
        self._is_over = threading.Event()
        self._note: Callable[[Exit], None] = lambda _: None

    @classmethod
    def start_on_hosts(
        cls,
        spec: ClusterSpec,
        *,
        folder: Path,
        home: Path,
        on_exit: Callable[[Exit], None],
        progress: Callable[[str], None],
    ) -> "HostProcesses":
        """Start the controller here, and the hosts' agents; ``place`` waits for them.

        Raises:
            UserError: the hosts cannot be had.
        """
        starter = starter_for(spec, folder, progress)
        try:
            address = starter.address
            ports = free_ports(address, NUM_SOCKETS) if address else ()
            local = Processes.start(
                folder=folder,
                controller_arguments=controller_arguments(folder / "profile", address, ports),
                num_threads=1,
                method="none",
                on_exit=on_exit,
            )
        except BaseException:
            starter.stop()
            raise
        spec = only_hosts(spec, starter.hosts)
        processes = cls(local, starter, spec, folder, home)
        processes._note = on_exit
        try:
            for number, (name, _) in enumerate(parse_hosts(starter.hosts)):
                processes._agents[number] = processes._start_agent(number, name)
        except BaseException:
            processes.stop()
            raise
        return processes

    def place(self, progress: Callable[[str], None]) -> tuple[Placement, int]:
        """Check the hosts and place the ranks; return also a free port of the first host.

        ``progress`` is called with a few words on each phase.

        Raises:
            UserError: one sentence on the first host that cannot be used.
        """
        agents = list(self._agents.values())
        self._check(agents)
        self._probe(agents)
        sizes = [size for _, size in parse_hosts(self._spec.hosts)]
        shares = [
            max(1, agent.report["num_cores"] // (size or agent.report["num_cores"]))
            for agent, size in zip(agents, sizes, strict=True)
        ]
        self._environment = {
            "OMP_NUM_THREADS": str(self._spec.num_threads or min(shares)),
            "TORCH_FR_BUFFER_SIZE": str(RECORDED_CALLS),
        }
        if preload := os.environ.get("DDPNB_PRELOAD"):
            self._environment["DDPNB_PRELOAD"] = preload
        progress("importing torch")
        for agent in agents:
            agent.prepare(self._environment)
        for agent in agents:
            agent.wait(agent.ready, PREPARE_SECONDS)
        self._placement = place_on_hosts(self._spec, [self._report(agent) for agent in agents])
        return self._placement, int(agents[0].report["free_port"])

    def connect_engines(self) -> None:
        """Have every host's engines find the controller, which listens by now."""
        for agent in self._agents.values():
            self._connect(agent)

    # -- the interface of Processes --------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id of this host's fork server."""
        return self._local.pid

    @property
    def stopped_members(self) -> frozenset[Member]:
        """The ranks that received SIGSTOP and have not gone on, on any host."""
        return frozenset().union(*(each.stopped_members for each in self._agents.values()))

    def start_rank(
        self, rank: int, environment: Mapping[str, str], settings: Mapping[str, object]
    ) -> None:
        """Start one rank on its host."""
        self._agent_of(rank).start_rank(rank, environment, settings)

    def profile_of(self, rank: int, profile: Path) -> Path:
        """Return ipyparallel's folder on a rank's host, where an agent is started if none runs."""
        assert self._placement is not None
        number = self._placement.host_of(rank)
        if self._agents[number].ended.is_set():
            self._agents[number] = agent = self._start_agent(number, self._agents[number].name)
            try:
                self._check([agent])
                agent.prepare(self._environment)
                agent.wait(agent.ready, PREPARE_SECONDS)
                self._connect(agent)
            except BaseException:
                agent.stop()  # else the next attempt would take it as ready
                raise
        return Path(self._agents[number].report["folder"]) / "profile"

    def unreachable(self) -> str:
        """Return which hosts do not reach each other, as a part of a sentence; empty if all do."""
        agents = [agent for agent in self._agents.values() if not agent.ended.is_set()]
        try:
            broken = self._broken_links(agents)
        except UserError:  # it is being lost, which its end reports
            return ""
        return "; ".join(f"host {one} does not reach host {other}" for one, other, _ in broken)

    def command(self, rank: int, command: RankCommand, *arguments: object) -> "Future[Any]":
        """Have a rank's control thread carry out a command; see ``Processes.command``."""
        return self._agent_of(rank).command(rank, command, *arguments)

    def list_connections(self) -> None:
        """Have each agent list which of its ranks are connected; see ``Processes``."""
        for agent in self._agents.values():
            agent.list_connections()

    def signal(self, ranks: list[int], number: int) -> "list[Future[Any]]":
        """Send a signal to those of the ranks that are alive; see ``Processes.signal``."""
        assert self._placement is not None
        sent: list[Future[Any]] = []
        for host, agent in self._agents.items():
            if here := [rank for rank in ranks if rank in self._placement.ranks_of(host)]:
                sent += agent.signal(here, number)
        return sent

    def stop(self) -> None:
        """End every process on every host and wait for it; may be called twice."""
        self._is_over.set()
        with ThreadPoolExecutor(len(self._agents) + 1) as pool:
            for each in (*self._agents.values(), self._local):
                pool.submit(each.stop)
        self._starter.stop()

    # -- private ---------------------------------------------------------------------

    def _start_agent(self, number: int, name: str) -> AgentProcesses:
        log = self._folder / f"host-{number}.log"
        log.unlink(missing_ok=True)
        process, pipe = self._starter.start(
            name,
            secrets.token_hex(8),
            python=self._spec.python,
            sockets=[self._folder / f"engine-{n}" for n in range(NUM_SOCKETS)],
            log=log,
        )
        agent = AgentProcesses(
            name,
            pipe=pipe,
            server=process,
            log=log,
            starter=self._starter,
            on_exit=lambda exit_: self._note_end(number, name, exit_),
        )
        return agent

    def _note_end(self, number: int, name: str, exit_: Exit) -> None:
        """Note a rank's end, or the end of all ranks of a host with its agent."""
        if exit_.member is not Service.FORK_SERVER:
            return self._note(exit_)
        if self._placement is not None and not self._is_over.is_set():
            reason = self._starter.ended() or "its connection or its agent ended"
            for rank in self._placement.ranks_of(number):
                cause = f"was lost with host {name}: {reason}"
                self._note(Exit(member=rank, code=None, cause=cause))

    def _agent_of(self, rank: int) -> AgentProcesses:
        assert self._placement is not None
        return self._agents[self._placement.host_of(rank)]

    def _check(self, agents: Sequence[AgentProcesses]) -> None:
        """Have agents describe their hosts; raises a UserError where one is not fit."""
        interface = self._spec.interface
        question: dict[str, object] = {"home": str(self._home), "interface": interface}
        for agent in agents:
            agent.check(**question, others=[])
        others = [agent.report["reached"] for agent in self._agents.values() if agent.report]
        others += [self._starter.address] if self._starter.address else []
        for agent in agents:
            if agent.report["reached"].startswith("127."):  # it must learn its way to the others
                agent.check(**question, others=others)
        for agent in agents:
            if sentence := unfit(agent.name, agent.report, self._home, interface):
                raise UserError(sentence)

    def _probe(self, agents: Sequence[AgentProcesses]) -> None:
        for one, other, error in self._broken_links(agents):
            raise UserError(
                f"Host {one} does not reach host {other} at its address "
                f"{self._report_of(other)['address']} ({error.lower()}): open the ports between "
                "the hosts, or choose another network with --interface."
            )

    def _broken_links(self, agents: Sequence[AgentProcesses]) -> list[tuple[str, str, str]]:
        """Return each pair of hosts of which the first does not reach the second, and the error."""
        where = {a.name: (a.report["address"], a.report["port"]) for a in agents}

        def probe(agent: AgentProcesses) -> list[tuple[str, str, str]]:
            others = {name: place for name, place in where.items() if name != agent.name}
            errors = agent.ask(KernelRequest.PROBE, others=others)
            return [(agent.name, name, error) for name, error in errors.items() if error]

        with ThreadPoolExecutor(max(1, len(agents))) as pool:
            return [link for links in pool.map(probe, agents) for link in links]

    def _report_of(self, name: str) -> Event:
        return next(agent.report for agent in self._agents.values() if agent.name == name)

    def _report(self, agent: AgentProcesses) -> HostReport:
        return HostReport(
            name=agent.name,
            address=agent.report["address"],
            interface=agent.report["interface"],
            num_cores=agent.report["num_cores"],
            num_gpus=len(agent.ready.result()),
        )

    def _connect(self, agent: AgentProcesses) -> None:
        """Have a host's engines use the controller's ports, or its sockets as ssh forwards them."""
        profile = self._folder / "profile"
        connection = json.loads((profile / "security/ipcontroller-engine.json").read_text())
        names: list[str] = []
        if not self._starter.address:
            names = sorted(each.name.removeprefix("socket") for each in profile.glob("socket*"))
            names = [name for name in names if int(name.lstrip(":-")) in _numbers(connection)]
        assert len(names) <= NUM_SOCKETS, names
        for number, name in enumerate(names):
            link = self._folder / f"engine-{number}"
            if not link.is_symlink():
                link.symlink_to(profile / f"socket{name}")
        agent.ask(KernelRequest.CONNECT, connection=connection, sockets=names)


def only_hosts(spec: ClusterSpec, hosts: str) -> ClusterSpec:
    """Return the spec once it is known which hosts there are."""
    return replace(
        spec,
        hosts=hosts,
        engines="",
        profile="",
        num_ranks=None,
        ranks_per_host=None,
        slurm="",
        timeout=None,
    )


def _numbers(connection: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the controller's sockets in the engines' connection file."""
    found = set()
    for value in connection.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and not isinstance(each, bool):
                found.add(each)
    return found
