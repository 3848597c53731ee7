"""How the parameter server is started, and how its workers connect to it (ranks)."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import final

from torch import nn

from ddpnb.rank.comm.flat_buffers import PackedTensors, pack
from ddpnb.rank.comm.network_transports import (
    RpcClientTransport,
    connect_gloo,
    serve_gloo,
    serve_rpc,
)
from ddpnb.rank.comm.parameter_server import (
    SERVER_RANK,
    Gradients,
    ParameterServer,
    Reply,
    RequestKind,
    WorkerRequest,
)
from ddpnb.rank.comm.rendezvous import (
    NO_RANK,
    RankLostError,
    Rendezvous,
    RunOverError,
    WorkerConfig,
    host_id,
)
from ddpnb.rank.comm.transport import (
    ClientTransport,
    DirectTransport,
    Drain,
    PeerGoneError,
    SharedMemory,
    connect_shm,
    serve_shm,
)

ServerFactory = Callable[[Sequence[PackedTensors]], ParameterServer]
"""Makes the server from memory for the parameters: one copy for each worker."""

_TRANSPORT = "transport"
_CONNECT: dict[str, Callable[[WorkerConfig, ExitStack], ClientTransport]] = {
    "shm": connect_shm,
    "gloo": connect_gloo,
    "rpc": RpcClientTransport,
}


@final
class ParameterClient:
    """One worker's access to the parameter server.

    Every call blocks until the server lets the worker go on, and raises ``RankLostError``
    where the run is over.  ``close`` before ``finish`` ends the run for all.

    Args:
        transport: to the server.
        parameters: the trained parameters, on this worker's device.  On a CPU they then lie where
            the server writes them; to other devices they are copied.
    """

    def __init__(self, transport: ClientTransport, parameters: Sequence[nn.Parameter]) -> None:
        self._transport = transport
        self._parameters = parameters
        in_place = [p.device.type == "cpu" and p.is_contiguous() for p in parameters]
        self._in_place = [n for n, is_so in enumerate(in_place) if is_so]
        self._copied = [n for n, is_so in enumerate(in_place) if not is_so]
        self._current: int | None = None
        """Number of the copy that the parameters in place lie in."""
        self._is_over = False

    def begin(self) -> Reply:
        """Wait for all workers; take the first parameters and shards."""
        return self._call(WorkerRequest(RequestKind.BEGIN))

    def push(self, weight: float = 1.0) -> Reply:
        """Send the parameters' gradients; take parameters and the next shard.

        Args:
            weight: this worker's share of the global batch, not yet in the gradients.
        """
        request = WorkerRequest(RequestKind.PUSH, weight)
        return self._call(request, [parameter.grad for parameter in self._parameters])

    def finish(self) -> None:
        """Wait until all workers are done; copy the final parameters."""
        self._call(WorkerRequest(RequestKind.DONE))
        self._is_over = True
        self.close()

    def close(self) -> None:
        """Report a failure unless this worker has finished; may be called twice."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(PeerGoneError):
                self._transport.call(WorkerRequest(RequestKind.LEAVE))
        if self._current is not None:  # the parameters need memory of their own again
            self._current = None
            for n in self._in_place:
                self._parameters[n].data = self._parameters[n].data.clone()

    def _call(self, request: WorkerRequest, gradients: Gradients = ()) -> Reply:
        try:
            reply = self._transport.call(request, gradients)
        except PeerGoneError as error:
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error
        if reply.lost_rank != NO_RANK:
            self._is_over = True
            raise RankLostError(reply.lost_rank)
        self._train_on(reply.copy)
        return reply

    def _train_on(self, number: int) -> None:
        """Bring a copy of the parameters into the model."""
        tensors = self._transport.copies[number].tensors
        if number != self._current:
            self._current = number
            for n in self._in_place:
                self._parameters[n].data = tensors[n]
        for n in self._copied:
            self._parameters[n].data.copy_(tensors[n])


def start_server(
    config: WorkerConfig, make_server: ServerFactory, opened: ExitStack
) -> tuple[ParameterServer, Drain, ParameterClient]:
    """Start the server on rank 0 and connect its own worker; ``opened`` closes what is opened."""
    rendezvous = Rendezvous(config)
    opened.callback(rendezvous.delete, _TRANSPORT, *map(_host_key, config.other_ranks))
    name = _choose_transport(config, rendezvous) if config.transport == "auto" else config.transport
    if name == "shm":
        memory = SharedMemory.create(config.path("m"), config.parameters, config.world_size)
        opened.enter_context(closing(memory))
        server = make_server(memory.copies)
        drain = serve_shm(server, memory, config, opened)
        rendezvous.set(_TRANSPORT, name)
    else:
        server = make_server([pack(config.parameters) for _ in range(config.world_size)])
        rendezvous.set(_TRANSPORT, name)  # first, as every rank takes part in what follows
        serve = serve_gloo if name == "gloo" else serve_rpc
        drain = serve(server, config, opened)
    server.find_failed_rank = rendezvous.find_failed_rank
    opened.enter_context(config.cancellation.held(lambda: server.fail(SERVER_RANK)))
    return server, drain, _client(DirectTransport(server), config, opened)


def connect(config: WorkerConfig, opened: ExitStack) -> ParameterClient:
    """Connect another rank's worker, once rank 0 has started the server.

    Raises:
        RankLostError: there is no server.
    """
    rendezvous = Rendezvous(config)
    if config.transport == "auto":
        rendezvous.set(_host_key(config.rank), host_id(config.folder))
    name = rendezvous.get(_TRANSPORT, from_rank=SERVER_RANK)
    try:
        return _client(_CONNECT[name](config, opened), config, opened)
    except RunOverError as error:
        raise RankLostError(SERVER_RANK) from error


def join(config: WorkerConfig, opened: ExitStack) -> ParameterClient:
    """Connect a worker to a run that has begun without it.

    Raises:
        RunOverError: the run has ended.
    """
    return _client(connect_shm(config, opened), config, opened)


def _client(transport: ClientTransport, config: WorkerConfig, opened: ExitStack) -> ParameterClient:
    return opened.enter_context(closing(ParameterClient(transport, config.parameters)))


def _choose_transport(config: WorkerConfig, rendezvous: Rendezvous) -> str:
    """Return shm where all ranks share a host's memory, else gloo."""
    hosts = {rendezvous.get(_host_key(rank), from_rank=rank) for rank in config.other_ranks}
    return "shm" if hosts <= {host_id(config.folder)} else "gloo"


def _host_key(rank: int) -> str:
    return f"host-{rank}"
