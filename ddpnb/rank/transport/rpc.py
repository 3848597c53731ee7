"""How do workers push and pull by ``torch.distributed.rpc``, for reference?  (Rank side.)

Each call of a worker is one remote call to rank 0 with the gradients as argument and the
parameters as result.  TensorPipe serves it in a thread of its own, which may block.  It
does not say who has died: the processes of this host are looked at, those of another are
noticed by their silence.  Nobody joins later.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from ddpnb.compat.torch_internals import forget_rpc_agents
from ddpnb.rank.lifeline import Lifeline
from ddpnb.rank.transport.host import Host
from ddpnb.rank.transport.link import Landing, Link
from ddpnb.rank.transport.lookout import Lookout
from ddpnb.rank.transport.meeting import Meeting
from ddpnb.rank.transport.message import RankLostError, Reply
from ddpnb.rank.transport.packed import pack
from ddpnb.rank.transport.server import SERVER_RANK, Server

Answer = TypeVar("Answer")

_served: dict[str, Server] = {}
"""The one server of this process, by the run's name: a remote call names a function, and has
no other way to an object.  Empty between runs."""


class RpcAgent:
    """This rank's part in the network of remote calls of one run; takes part: every rank.

    Args:
        rank: this rank.
        world_size: number of ranks.
        folder: where the ranks of this host meet.
        name: of the run.
        timeout_seconds: how long one call may take.
        lifeline: frees this rank from waiting for the others to leave.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        folder: Path,
        name: str,
        timeout_seconds: float,
        lifeline: Lifeline,
    ) -> None:
        self._path = folder / f"{name}.rpc"
        self._timeout = timeout_seconds
        self._rank = rank
        self._world_size = world_size
        self._meeting = Meeting(f"{name}.rpc", rank, folder, timeout_seconds, lifeline)
        with _on_loopback(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own way
            # Torch counts a process's agents, and has each meet under its number: a process that
            # has just taken a dead one's place would wait under another.  The file is new anyway.
            forget_rpc_agents()
            rpc.init_rpc(
                _worker_name(rank),
                rank=rank,
                world_size=world_size,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                    init_method=f"file://{self._path}",
                    num_worker_threads=world_size + 1,  # each worker's call may block one
                    rpc_timeout=timeout_seconds,
                ),
            )
        self._is_open = True

    def say_good_bye(self) -> None:
        """End the agent together with all others; takes part: every rank, all of them alive."""
        if self._is_open:
            with contextlib.suppress(RuntimeError):  # one has died just now
                rpc.shutdown(graceful=True, timeout=self._timeout)
                self._is_open = False
                self._remove_file()

    def _remove_file(self) -> None:
        """Have rank 0 remove the file in which all have met, when nobody needs it any more."""
        if self._rank != SERVER_RANK:
            self._meeting.tell(f"gone-{self._rank}", "")
            return
        gone = [f"gone-{rank}" for rank in range(1, self._world_size)]
        with contextlib.suppress(RankLostError):
            for rank, what in enumerate(gone, start=1):
                self._meeting.read(what, of_rank=rank)
        self._path.unlink(missing_ok=True)
        self._meeting.forget(*gone)

    def close(self) -> None:
        """End the agent, whatever the other ranks do; may be called twice."""
        if self._is_open:
            self._is_open = False
            rpc.shutdown(graceful=False)
            self._path.unlink(missing_ok=True)


@final
class RpcHost(Host):
    """The server's entry in the table that remote calls look into; takes part: every rank.

    Args:
        server: what the workers call.
        name: of the run.
        make_agent: makes this rank's agent, when calls can be answered.
        dead: returns the ranks whose processes have died.
    """

    def __init__(
        self,
        server: Server,
        name: str,
        make_agent: Callable[[], RpcAgent],
        dead: Callable[[], Sequence[int]],
    ) -> None:
        self._server = server
        self._name = name
        self._lookout = Lookout(server, dead)
        _served[name] = server
        try:
            self._agent = make_agent()
        except BaseException:
            del _served[name]
            raise

    def start(self) -> None:
        """Look out for deaths; TensorPipe's threads run already."""
        self._lookout.start()

    def settle(self) -> None:
        """Wait until all workers have said that they have the final parameters."""
        if self._server.wait_for_thanks():
            self._agent.say_good_bye()

    def close(self) -> None:
        """Be found no more; end the agent."""
        self._lookout.close()
        _served.pop(self._name, None)
        self._agent.close()


@final
class RpcLink(Link):
    """A worker's remote calls.

    Args:
        agent: this rank's.
        name: of the run.
        rank: this worker.
        parameters: the parameters to train, on this worker's device.
    """

    def __init__(
        self, agent: RpcAgent, *, name: str, rank: int, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._agent = agent
        self._name = name
        self._rank = rank
        self._parameters = parameters
        self._received = pack(parameters)
        self._landing = Landing(parameters, [self._received])
        self._is_over = False

    def begin(self) -> Reply:
        """Have ``Server.begin`` called."""
        return self._take(_begin)

    def push(self, weight: float = 1.0) -> Reply:
        """Have ``Server.push`` called with the gradients."""
        gradients = [None if p.grad is None else p.grad.cpu() for p in self._parameters]
        return self._take(_push, gradients, weight)

    def finish(self) -> None:
        """Have ``Server.finish`` called."""
        self._take(_finish)
        self._is_over = True
        with contextlib.suppress(RankLostError):  # where one has died, rank 0 may not answer it
            if self._ask(_thank):
                self._agent.say_good_bye()
        self.close()

    def close(self) -> None:
        """Say that this worker failed, if it has not finished; end the agent."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(RankLostError):
                self._ask(_fail)
        self._landing.leave()
        self._agent.close()

    def _take(self, function: Callable[..., tuple[bytes, Tensor]], *arguments: Any) -> Reply:
        told, parameters = self._ask(function, *arguments)
        try:
            reply = Reply.unpack(told)
        except RankLostError:
            self._is_over = True
            raise
        self._received.raw.copy_(parameters)
        self._landing.take()
        return reply

    def _ask(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            answer: Answer = rpc.rpc_sync(
                _worker_name(SERVER_RANK), function, (self._name, self._rank, *arguments)
            )
        except RuntimeError as error:  # how TensorPipe says that the other end is gone
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error
        return answer


# What remote calls call, on rank 0.


def _begin(name: str, rank: int) -> tuple[bytes, Tensor]:
    server = _served[name]
    return _told(server, lambda: server.begin(rank))


def _push(
    name: str, rank: int, gradients: list[Tensor | None], weight: float
) -> tuple[bytes, Tensor]:
    server = _served[name]
    return _told(server, lambda: server.push(rank, gradients, weight))


def _finish(name: str, rank: int) -> tuple[bytes, Tensor]:
    server = _served[name]
    return _told(server, lambda: server.finish(rank))


def _thank(name: str, rank: int) -> bool:
    return _served[name].thank(rank)


def _fail(name: str, rank: int) -> None:
    _served[name].fail(rank)


def _told(server: Server, call: Callable[[], Reply]) -> tuple[bytes, Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8)
    try:
        reply = call()
        return reply.pack(), server.parameters(reply)
    except RankLostError as lost:
        return Reply(lost_rank=lost.rank).pack(), nothing
    except Exception as error:  # noqa: BLE001  # the thread's edge: rank 0 raises it
        server.fail(SERVER_RANK, error)
        return Reply(lost_rank=SERVER_RANK).pack(), nothing


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
