"""By which transport do a run's workers and its server come together, and how?  (Every rank.)"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from ddpnb.rank.transport.gloo import GlooHost, gloo_channel
from ddpnb.rank.transport.link import Channel, DirectChannel, Host, Link, Place, meeting_of
from ddpnb.rank.transport.meeting import Meeting, this_host
from ddpnb.rank.transport.message import RankLostError, RunOverError
from ddpnb.rank.transport.packed import Packed, SharedMemory, pack
from ddpnb.rank.transport.rpc import RpcChannel, RpcHost
from ddpnb.rank.transport.server import SERVER_RANK, Server
from ddpnb.rank.transport.shm import ShmHost, shm_channel

ServerFactory = Callable[[Callable[[], int], Sequence[Packed]], Server]

_TRANSPORT = "transport"


def serve(place: Place, make_server: ServerFactory, opened: ExitStack) -> tuple[Server, Host, Link]:
    """Open the server and connect rank 0's own worker to it.

    Args:
        place: rank 0's.
        make_server: makes the server, given what tells it who has failed before it came, and
            memory for as many copies of the parameters as there are workers.
        opened: closes all that is opened.
    """
    meeting = meeting_of(place)
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
    return server, host, _link(place, DirectChannel(server), opened)


def connect(place: Place, opened: ExitStack) -> Link:
    """Connect a worker of another rank, when rank 0 has opened the server.

    Raises:
        RankLostError: there is no server.
    """
    meeting = meeting_of(place)
    if place.transport == "auto":
        meeting.tell(f"host-{place.rank}", this_host(place.folder))
    transport = meeting.read(_TRANSPORT, of_rank=SERVER_RANK)
    channels: dict[str, Callable[[Place], Channel]] = {
        "shm": shm_channel,
        "gloo": gloo_channel,
        "rpc": RpcChannel,
    }
    try:
        return _link(place, channels[transport](place), opened)
    except RunOverError as error:
        raise RankLostError(SERVER_RANK) from error


def join(place: Place, opened: ExitStack) -> Link:
    """Connect a worker that was not there when the run began.

    Raises:
        RunOverError: the run has ended.
    """
    return _link(place, shm_channel(place), opened)


def _link(place: Place, channel: Channel, opened: ExitStack) -> Link:
    return opened.enter_context(closing(Link(channel, place.parameters)))


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
    match transport:
        case "gloo":
            return GlooHost(server, place)
        case "rpc":
            return RpcHost(server, place, meeting.dead)
        case _:
            assert memory is not None
            return ShmHost(server, memory, place)
