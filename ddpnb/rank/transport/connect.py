"""By which transport do a run's workers and its server come together, and how?  (Every rank.)"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ddpnb.rank.lifeline import Lifeline
from ddpnb.rank.transport.gloo import GlooGroup, GlooHost, GlooLink
from ddpnb.rank.transport.host import Host
from ddpnb.rank.transport.link import DirectLink, Link
from ddpnb.rank.transport.meeting import Meeting, this_host
from ddpnb.rank.transport.message import RankLostError, RunOverError
from ddpnb.rank.transport.packed import Packed, pack
from ddpnb.rank.transport.rpc import RpcAgent, RpcHost, RpcLink
from ddpnb.rank.transport.server import SERVER_RANK, Server
from ddpnb.rank.transport.shared_memory import SharedMemory
from ddpnb.rank.transport.shm import ShmHost, ShmLink

ServerFactory = Callable[[Callable[[], int], Sequence[Packed]], Server]

_TRANSPORT = "transport"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one worker of a run stands."""

    rank: int
    world_size: int
    folder: Path
    """What all ranks of this host, and nobody else, can reach."""
    name: str
    """Of the run."""
    transport: str
    """One of ``wire.TRANSPORTS``; the same on every rank."""
    parameters: Sequence[nn.Parameter]
    """What is trained, on this worker's device."""
    timeout_seconds: float
    """How long the server may take to answer."""
    lifeline: Lifeline
    """Frees this rank from waiting for another."""

    @property
    def others(self) -> range:
        """All ranks but the server's."""
        return range(1, self.world_size)


def serve(place: Place, make_server: ServerFactory, opened: ExitStack) -> tuple[Server, Host, Link]:
    """Open the server and connect rank 0's own worker to it.

    Args:
        place: rank 0's.
        make_server: makes the server, given what tells it who has failed before it came, and
            memory for as many copies of the parameters as there are workers.
        opened: closes all that is opened.
    """
    meeting = _meeting(place)
    hosts = [f"host-{rank}" for rank in place.others]
    opened.callback(meeting.forget, _TRANSPORT, *hosts)
    transport = _chosen(place, meeting) if place.transport == "auto" else place.transport
    memory = opened.enter_context(closing(_memory(place))) if transport == "shm" else None
    copies = memory.copies if memory else [pack(place.parameters) for _ in range(place.world_size)]
    server = make_server(meeting.absent, copies)
    opened.enter_context(place.lifeline.held(lambda: server.fail(SERVER_RANK)))
    if transport != "shm":  # the others are needed to open it
        meeting.tell(_TRANSPORT, transport)
    host = opened.enter_context(closing(_host(place, server, memory, transport, meeting)))
    host.start()
    if transport == "shm":
        meeting.tell(_TRANSPORT, transport)
    link = opened.enter_context(closing(DirectLink(server, place.rank, place.parameters)))
    return server, host, link


def connect(place: Place, opened: ExitStack) -> Link:
    """Connect a worker of another rank, when rank 0 has opened the server.

    Raises:
        RankLostError: there is no server.
    """
    meeting = _meeting(place)
    if place.transport == "auto":
        meeting.tell(f"host-{place.rank}", this_host(place.folder))
    transport = meeting.read(_TRANSPORT, of_rank=SERVER_RANK)
    try:
        return opened.enter_context(closing(_link(place, transport)))
    except RunOverError as error:
        raise RankLostError(SERVER_RANK) from error


def join(place: Place, opened: ExitStack) -> Link:
    """Connect a worker that was not there when the run began.

    Raises:
        RunOverError: the run has ended.
    """
    return opened.enter_context(closing(_link(place, "shm")))


def _chosen(place: Place, meeting: Meeting) -> str:
    """Return shm where all ranks share a host's memory, else gloo."""
    told = [meeting.read(f"host-{rank}", of_rank=rank) for rank in place.others]
    return "shm" if all(host == this_host(place.folder) for host in told) else "gloo"


def _memory(place: Place) -> SharedMemory:
    path = place.folder / f"{place.name}.m"
    return SharedMemory.create(path, place.parameters, place.world_size)


def _host(
    place: Place, server: Server, memory: SharedMemory | None, transport: str, meeting: Meeting
) -> Host:
    seconds = place.timeout_seconds
    match transport:
        case "gloo":
            return GlooHost(server, GlooGroup(seconds), ranks=place.others, timeout_seconds=seconds)
        case "rpc":
            return RpcHost(server, place.name, lambda: _agent(place), meeting.dead)
        case _:
            assert memory is not None
            return ShmHost(
                server, memory, folder=place.folder, name=place.name, timeout_seconds=seconds
            )


def _link(place: Place, transport: str) -> Link:
    match transport:
        case "gloo":
            return GlooLink(GlooGroup(place.timeout_seconds), place.parameters)
        case "rpc":
            return RpcLink(
                _agent(place), name=place.name, rank=place.rank, parameters=place.parameters
            )
        case _:
            return ShmLink(
                folder=place.folder,
                name=place.name,
                rank=place.rank,
                num_workers=place.world_size,
                parameters=place.parameters,
                timeout_seconds=place.timeout_seconds,
                lifeline=place.lifeline,
            )


def _agent(place: Place) -> RpcAgent:
    return RpcAgent(
        rank=place.rank,
        world_size=place.world_size,
        folder=place.folder,
        name=place.name,
        timeout_seconds=place.timeout_seconds,
        lifeline=place.lifeline,
    )


def _meeting(place: Place) -> Meeting:
    return Meeting(place.name, place.rank, place.folder, place.timeout_seconds, place.lifeline)
