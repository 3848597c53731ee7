"""The transports between hosts: gloo's send and recv, and RPC as a reference (ranks).

Over gloo all ranks form a group of the run's own, for tensors and for messages of fixed size.
With ``torch.distributed.rpc`` each request is one remote call to rank 0, with the gradients as
argument and the parameters as result.  TensorPipe serves each call in a thread, which may block.
It does not report deaths: on this host the processes are checked, on others a silent worker times
out.  Over either no worker joins later.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from ddpnb.compat.torch_internals import forget_rpc_agents, group_store
from ddpnb.rank.comm.flat_buffers import pack
from ddpnb.rank.comm.parameter_server import (
    SERVER_RANK,
    Gradients,
    ParameterServer,
    Reply,
    RequestKind,
    WorkerRequest,
)
from ddpnb.rank.comm.rendezvous import NO_RANK, Rendezvous, WorkerConfig
from ddpnb.rank.comm.transport import (
    ClientTransport,
    ConnectionTransport,
    Drain,
    PeerConnection,
    PeerGoneError,
    on_cpu,
    serve_connection,
    start_thread,
)


def serve_gloo(server: ParameterServer, config: WorkerConfig, opened: ExitStack) -> Drain:
    """Serve each other rank in a thread, until its last message; takes part: every rank."""
    group = _new_group(config, opened)
    threads = []
    for rank in config.other_ranks:
        connection, gradients = _GlooConnection(group, rank), pack(config.parameters)
        threads.append(start_thread(serve_connection, server, rank, connection, gradients))

    def drain() -> None:
        for thread in threads:
            thread.join(config.timeout_seconds)

    opened.callback(drain)
    return drain


def connect_gloo(config: WorkerConfig, opened: ExitStack) -> ConnectionTransport:
    """Connect a worker to rank 0; takes part: every rank."""
    connection = _GlooConnection(_new_group(config, opened), SERVER_RANK)
    copies = [pack(config.parameters)] * config.world_size  # one, whichever a reply names
    return ConnectionTransport(connection, pack(config.parameters), copies)


@final
class _GlooConnection(PeerConnection):
    gone = RuntimeError

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, data: bytes) -> None:
        self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self, num_bytes: int) -> bytes:
        data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.receive_tensor(data)
        return bytes(data.tolist())

    def send_tensor(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer, group=self._group)

    def receive_tensor(self, tensor: Tensor) -> None:
        dist.recv(tensor, self._peer, group=self._group)


def _new_group(config: WorkerConfig, opened: ExitStack) -> dist.ProcessGroup:
    """Form the run's group, which ``opened`` destroys; takes part: every rank."""
    timeout = timedelta(seconds=config.timeout_seconds)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    opened.callback(dist.destroy_process_group, group)
    return group


_SHUT_DOWN = "rpc-down"
_SCHEME = "ddpnb"
_servers: dict[str, ParameterServer] = {}
"""This process's server, by the run's name, for remote calls, which name a function; empty between
runs."""


def serve_rpc(server: ParameterServer, config: WorkerConfig, opened: ExitStack) -> Drain:
    """Register the server for remote calls; takes part: every rank."""
    server.find_dead_ranks = Rendezvous(config).find_dead_ranks
    _servers[config.name] = server
    opened.callback(_servers.pop, config.name)
    agent = opened.enter_context(contextlib.closing(_Agent(config)))

    def drain() -> None:
        if server.wait_until_all_have_left():
            agent.shut_down_together()

    return drain


@final
class RpcClientTransport(ClientTransport):
    """A worker's remote calls; takes part: every rank."""

    def __init__(self, config: WorkerConfig, opened: ExitStack) -> None:
        self._caller = (config.name, config.rank)
        self._agent = opened.enter_context(contextlib.closing(_Agent(config)))
        self.copies = [pack(config.parameters)] * config.world_size  # one, whichever a reply names

    def call(self, request: WorkerRequest, gradients: Gradients = ()) -> Reply:
        """Have rank 0 handle a request; after ``DONE``, leave the server."""
        reply, parameters = self._call(request, on_cpu(gradients))
        if parameters is not None:
            self.copies[0].raw.copy_(parameters)
        if request.kind is RequestKind.DONE and reply.lost_rank == NO_RANK:
            with contextlib.suppress(PeerGoneError):  # after a death rank 0 may not answer
                self._call(WorkerRequest(RequestKind.LEAVE))
                if reply.is_complete:
                    self._agent.shut_down_together()
        return reply

    def _call(self, *arguments: Any) -> tuple[Reply, Tensor | None]:
        try:
            result: tuple[Reply, Tensor | None] = rpc.rpc_sync(
                _worker_name(SERVER_RANK), _handle, (*self._caller, *arguments)
            )
        except RuntimeError as error:  # TensorPipe's report that the other end is gone
            raise PeerGoneError from error
        return result


def _handle(
    name: str, rank: int, request: WorkerRequest, gradients: Gradients = ()
) -> tuple[Reply, Tensor | None]:
    """Handle a worker's request; remote calls run this on rank 0."""
    server = _servers.get(name)
    if server is None:
        return Reply(lost_rank=SERVER_RANK), None
    reply = server.handle(rank, request, gradients)
    if reply.lost_rank != NO_RANK or request.kind is RequestKind.LEAVE:
        return reply, None
    return reply, server.parameters(reply)


class _Agent:
    """This rank's RPC agent for one run; takes part: every rank."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._path = config.path("rpc")
        self._rendezvous = Rendezvous(config)
        with _on_loopback(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend")  # by torch itself
            # Torch numbers a process's agents and has each meet under its number: a process that
            # has just replaced a dead one would wait under another.  The file is new anyway.
            forget_rpc_agents()
            rpc.init_rpc(
                _worker_name(config.rank),
                rank=config.rank,
                world_size=config.world_size,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                    init_method=_meeting_place(self._path),
                    num_worker_threads=config.world_size + 1,  # each worker's call may block one
                    rpc_timeout=config.timeout_seconds,
                ),
            )
        self._is_open = True

    def shut_down_together(self) -> None:
        """End the agent together with all others; takes part: every rank, all of them alive."""
        with contextlib.suppress(RuntimeError):  # a rank has died just now
            rpc.shutdown(graceful=True, timeout=self._config.timeout_seconds)
            self._is_open = False
            if self._rendezvous.count(_SHUT_DOWN) == self._config.world_size:
                self._path.unlink(
                    missing_ok=True
                )  # no other rank uses the file in which all have met
                self._rendezvous.delete(_SHUT_DOWN)

    def close(self) -> None:
        """End the agent, whatever the other ranks do; may be called twice."""
        if self._is_open:
            self._is_open = False
            rpc.shutdown(graceful=False)
            self._path.unlink(missing_ok=True)


def _meeting_place(path: Path) -> str:
    """Return where agents meet: a file, or on several hosts the process group's own store."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return f"file://{path}"
    with contextlib.suppress(RuntimeError):  # registered already
        register_rendezvous_handler(_SCHEME, _group_rendezvous)
    return f"{_SCHEME}://{path.name}"


def _group_rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Meet in the process group's store, under the run's name, as ``dist.rendezvous`` does."""
    name = urlsplit(url).netloc
    yield dist.PrefixStore(name, group_store()), dist.get_rank(), dist.get_world_size()


def _worker_name(rank: int) -> str:
    return f"ddpnb-{rank}"


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have TensorPipe listen on the loopback interface unless the environment names another."""
    before = os.environ.get("TP_SOCKET_IFNAME")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ["TP_SOCKET_IFNAME"]
