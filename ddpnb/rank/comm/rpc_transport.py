"""How do workers push and pull by ``torch.distributed.rpc``, for reference?  (Rank side.)

Each call of a worker is one remote call to rank 0 with the gradients as argument and the
parameters as result.  TensorPipe serves it in a thread of its own, which may block.  It
does not say who has died: the processes of this host are looked at, those of another are
noticed by their silence.  Nobody joins later.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, final

from torch import Tensor
from torch.distributed import rpc

from ddpnb.compat.torch_internals import forget_rpc_agents
from ddpnb.rank.comm.client import (
    Channel,
    Gradients,
    Place,
    ServerTransport,
    answer,
    on_cpu,
    rendezvous_of,
)
from ddpnb.rank.comm.messages import (
    NOBODY,
    Asked,
    PeerGoneError,
    RankLostError,
    Reply,
    Request,
)
from ddpnb.rank.comm.packed_tensors import pack
from ddpnb.rank.comm.parameter_server import SERVER_RANK, Server

_served: dict[str, Server] = {}
"""The one server of this process, by the run's name: a remote call names a function, and has
no other way to an object.  Empty between runs."""


class _Agent:
    """This rank's part in the network of remote calls of one run; takes part: every rank."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._path = place.folder / f"{place.name}.rpc"
        with _on_loopback(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own way
            # Torch counts a process's agents, and has each meet under its number: a process that
            # has just taken a dead one's place would wait under another.  The file is new anyway.
            forget_rpc_agents()
            rpc.init_rpc(
                _worker_name(place.rank),
                rank=place.rank,
                world_size=place.world_size,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                    init_method=f"file://{self._path}",
                    num_worker_threads=place.world_size + 1,  # each worker's call may block one
                    rpc_timeout=place.timeout_seconds,
                ),
            )
        self._is_open = True

    def say_good_bye(self) -> None:
        """End the agent together with all others; takes part: every rank, all of them alive."""
        with contextlib.suppress(RuntimeError):  # one has died just now
            rpc.shutdown(graceful=True, timeout=self._place.timeout_seconds)
            self._is_open = False
            self._remove_file()

    def _remove_file(self) -> None:
        """Have rank 0 remove the file in which all have met, when nobody needs it any more."""
        place, gone = self._place, [f"rpc-gone-{rank}" for rank in self._place.others]
        rendezvous = rendezvous_of(place)
        if place.rank != SERVER_RANK:
            return rendezvous.tell(gone[place.rank - 1], "")
        with contextlib.suppress(RankLostError):
            for rank, what in enumerate(gone, start=1):
                rendezvous.read(what, of_rank=rank)
        self._path.unlink(missing_ok=True)
        rendezvous.forget(*gone)

    def close(self) -> None:
        """End the agent, whatever the other ranks do; may be called twice."""
        if self._is_open:
            self._is_open = False
            rpc.shutdown(graceful=False)
            self._path.unlink(missing_ok=True)


@final
class RpcServer(ServerTransport):
    """The server's entry in the table that remote calls look into; takes part: every rank.

    Args:
        server: what the workers call.
        place: rank 0's.
    """

    def __init__(self, server: Server, place: Place) -> None:
        self._server = server
        server.dead = rendezvous_of(place).dead
        with contextlib.ExitStack() as opened:
            _served[place.name] = server
            opened.callback(_served.pop, place.name)
            self._agent = opened.enter_context(contextlib.closing(_Agent(place)))
            self._opened = opened.pop_all()

    def settle(self) -> None:
        """Wait until all workers have said that they have the final parameters."""
        if self._server.wait_until_all_have_left():
            self._agent.say_good_bye()

    def close(self) -> None:
        """Be found no more; end the agent."""
        self._opened.close()


@final
class RpcChannel(Channel):
    """A worker's remote calls; takes part: every rank."""

    def __init__(self, place: Place) -> None:
        self._caller = (place.name, place.rank)
        self._agent = _Agent(place)
        self.copies = [pack(place.parameters)] * place.world_size  # whichever the server names

    def ask(self, asked: Asked, gradients: Gradients = ()) -> Reply:
        """Have ``answer`` called; after the last one, part from the server."""
        reply, parameters = self._call(asked, on_cpu(gradients))
        if parameters is not None:
            self.copies[0].raw.copy_(parameters)
        if asked.request is Request.DONE and reply.lost_rank == NOBODY:
            with contextlib.suppress(PeerGoneError):  # where one has died, rank 0 may not answer
                self._call(Asked(Request.LEAVE))
                if reply.is_complete:
                    self._agent.say_good_bye()
        return reply

    def close(self) -> None:
        """End the agent."""
        self._agent.close()

    def _call(self, *arguments: Any) -> tuple[Reply, Tensor | None]:
        try:
            answered: tuple[Reply, Tensor | None] = rpc.rpc_sync(
                _worker_name(SERVER_RANK), _answer, (*self._caller, *arguments)
            )
        except RuntimeError as error:  # how TensorPipe says that the other end is gone
            raise PeerGoneError from error
        return answered


def _answer(
    name: str, rank: int, asked: Asked, gradients: Gradients = ()
) -> tuple[Reply, Tensor | None]:
    """Answer a worker; what remote calls call, on rank 0."""
    server = _served.get(name)
    if server is None:
        return Reply(lost_rank=SERVER_RANK), None
    reply = answer(server, rank, None, asked, gradients)
    if reply.lost_rank != NOBODY or asked.request is Request.LEAVE:
        return reply, None
    return reply, server.parameters(reply)


def _worker_name(rank: int) -> str:
    return f"ddpnb-{rank}"


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have TensorPipe listen on the loopback interface unless the environment says where."""
    before = os.environ.get("TP_SOCKET_IFNAME")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ["TP_SOCKET_IFNAME"]
