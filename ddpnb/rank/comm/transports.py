"""By which transport do a run's workers and its server come together, and how?  (Every rank.)"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from ddpnb.rank.comm.client import (
    Channel,
    DirectChannel,
    Place,
    ServerClient,
    ServerTransport,
    rendezvous_of,
)
from ddpnb.rank.comm.gloo_transport import GlooServer, gloo_channel
from ddpnb.rank.comm.messages import RankLostError, RunOverError
from ddpnb.rank.comm.packed_tensors import PackedTensors, SharedMemory, pack
from ddpnb.rank.comm.parameter_server import SERVER_RANK, Server
from ddpnb.rank.comm.rendezvous import Rendezvous, this_host
from ddpnb.rank.comm.rpc_transport import RpcChannel, RpcServer
from ddpnb.rank.comm.shm_transport import ShmServer, shm_channel

ServerFactory = Callable[[Callable[[], int], Sequence[PackedTensors]], Server]

_TRANSPORT = "transport"


def serve(
    place: Place, make_server: ServerFactory, opened: ExitStack
) -> tuple[Server, ServerTransport, ServerClient]:
    """Open the server and connect rank 0's own worker to it.

    Args:
        place: rank 0's.
        make_server: makes the server, given what tells it who has failed before it came, and
            memory for as many copies of the parameters as there are workers.
        opened: closes all that is opened.
    """
    rendezvous = rendezvous_of(place)
    hosts = [f"host-{rank}" for rank in place.others]
    opened.callback(rendezvous.forget, _TRANSPORT, *hosts)
    transport = _chosen(place, rendezvous) if place.transport == "auto" else place.transport
    host: ServerTransport
    if transport == "shm":
        path, num_workers = place.folder / f"{place.name}.m", place.world_size
        memory = SharedMemory.create(path, place.parameters, num_workers)
        opened.enter_context(closing(memory))
        server = make_server(rendezvous.absent, memory.copies)
        host = ShmServer(server, memory, place)
        rendezvous.tell(_TRANSPORT, transport)
    else:
        copies = [pack(place.parameters) for _ in range(place.world_size)]
        server = make_server(rendezvous.absent, copies)
        rendezvous.tell(_TRANSPORT, transport)  # the others are needed to open it
        host = GlooServer(server, place) if transport == "gloo" else RpcServer(server, place)
    opened.enter_context(closing(host))
    opened.enter_context(place.cancellation.held(lambda: server.fail(SERVER_RANK)))
    return server, host, _client(place, DirectChannel(server), opened)


def connect(place: Place, opened: ExitStack) -> ServerClient:
    """Connect a worker of another rank, when rank 0 has opened the server.

    Raises:
        RankLostError: there is no server.
    """
    rendezvous = rendezvous_of(place)
    if place.transport == "auto":
        rendezvous.tell(f"host-{place.rank}", this_host(place.folder))
    transport = rendezvous.read(_TRANSPORT, of_rank=SERVER_RANK)
    channels: dict[str, Callable[[Place], Channel]] = {
        "shm": shm_channel,
        "gloo": gloo_channel,
        "rpc": RpcChannel,
    }
    try:
        return _client(place, channels[transport](place), opened)
    except RunOverError as error:
        raise RankLostError(SERVER_RANK) from error


def join(place: Place, opened: ExitStack) -> ServerClient:
    """Connect a worker that was not there when the run began.

    Raises:
        RunOverError: the run has ended.
    """
    return _client(place, shm_channel(place), opened)


def _client(place: Place, channel: Channel, opened: ExitStack) -> ServerClient:
    return opened.enter_context(closing(ServerClient(channel, place.parameters)))


def _chosen(place: Place, rendezvous: Rendezvous) -> str:
    """Return shm where all ranks share a host's memory, else gloo."""
    told = [rendezvous.read(f"host-{rank}", of_rank=rank) for rank in place.others]
    return "shm" if all(host == this_host(place.folder) for host in told) else "gloo"
