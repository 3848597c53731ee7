"""Who takes the workers' calls from other ranks to the server?  (Rank 0, threads.)"""

from abc import ABC, abstractmethod

from ddpnb.rank.transport.message import Asked, PeerGoneError, RankLostError, Reply, Request
from ddpnb.rank.transport.packed import Packed
from ddpnb.rank.transport.server import SERVER_RANK, Server


class Host(ABC):
    """The server's end of a transport; ``start`` it after all that can fail here has been done."""

    @abstractmethod
    def start(self) -> None:
        """Begin to take calls, in threads."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the last answer of every worker is on its way."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, remove what is left in the folder; may be called twice."""


class Caller(ABC):
    """One connected worker, as its thread on rank 0 sees it."""

    rank: int
    gradients: Packed

    @abstractmethod
    def receive(self) -> Asked:
        """Return what it asks; with a push, ``gradients`` are here."""

    @abstractmethod
    def answer(self, reply: Reply) -> None:
        """Send the answer and, unless somebody is lost, have the worker get its parameters."""


def serve(server: Server, caller: Caller) -> None:
    """Carry one worker's calls to the server until it is done, is lost or has failed."""
    rank, life = caller.rank, object()
    try:
        caller.answer(server.begin(rank, life))
        request = Request.PUSH
        while request is not Request.DONE:
            request, weight = caller.receive()
            if request is Request.LEAVE:
                return server.fail(rank)
            if request is Request.PUSH:
                reply = server.push(rank, caller.gradients.tensors, weight, life)
            else:
                reply = server.finish(rank, life)
            caller.answer(reply)
    except PeerGoneError:
        server.lose(rank, life)
        refuse(caller, server.reason(rank))  # it may live: it was given up, or rank 0 hangs up
    except RankLostError as lost:
        refuse(caller, lost.rank)
    except Exception as error:  # noqa: BLE001  # the thread's edge: rank 0 raises it
        server.fail(SERVER_RANK, error)
        refuse(caller, SERVER_RANK)


def refuse(caller: Caller, lost_rank: int) -> None:
    """Tell a worker that the run is over, if it can be told."""
    try:
        caller.answer(Reply(lost_rank=lost_rank))
    except PeerGoneError:
        return
