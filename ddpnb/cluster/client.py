"""How does a call reach the ranks, and what comes back while it runs?  (Notebook side.)

ipyparallel carries it.  Its client hands every message from a rank to a callback
in its own thread; here they go into the call's queue, together with the results.
"""

import time
from collections.abc import Sequence
from typing import Any

import ipyparallel as ipp
from ipyparallel.error import RemoteError

from ddpnb.cluster.call import Call, Events, Lost, Output, OutputEnded, Returned
from ddpnb.compat import ipyparallel_internals, python_internals
from ddpnb.protocol.remote_call import OnRank


class Dispatcher:
    """Sends calls to the ranks through an ipyparallel client.

    Args:
        client: a connected client; engine ids are rank numbers when it starts,
            and ``engine_of`` follows ranks that came back under another id.
    """

    def __init__(self, client: ipp.Client) -> None:
        self.client = client
        self.engine_of: dict[int, int] = {}
        self._calls: list[Call] = []

    @property
    def missing(self) -> tuple[str, ...]:
        """What is off on this side because a library is of another version."""
        return (*ipyparallel_internals.missing_features(), *python_internals.missing_features())

    def submit(self, function: OnRank, *arguments: object, ranks: Sequence[int]) -> Call:
        """Start ``function(*arguments)`` on some ranks and return at once."""
        call = Call(ranks=tuple(ranks))
        self._calls = [other for other in self._calls if not other.done] + [call]
        for rank in ranks:
            self._send(call, rank, function, arguments)
        return call

    def gather(
        self, function: OnRank, *arguments: object, ranks: Sequence[int], timeout: float
    ) -> list[Any]:
        """Call ``function`` on some ranks and return their results, in order of ranks.

        Raises:
            TimeoutError: where a rank did not answer in ``timeout`` seconds.
            RuntimeError: where a rank died, or the call itself failed there.
        """
        return self.collect(self.submit(function, *arguments, ranks=ranks), timeout)

    def collect(self, call: Call, timeout: float) -> list[Any]:
        """Wait for a call and return its results, in order of ranks; raises as ``gather``."""
        deadline = time.monotonic() + timeout
        values: dict[int, Any] = {}
        while call.running:
            if (left := deadline - time.monotonic()) <= 0:
                waiting = ", ".join(map(str, sorted(call.running)))
                raise TimeoutError(f"no answer within {timeout:.0f} s from rank {waiting}")
            for event in call.events(left):
                if isinstance(event, Lost):
                    raise RuntimeError(f"rank {event.rank}: {event.cause}")
                if isinstance(event, Returned):
                    values[event.rank] = event.value
        return [values[rank] for rank in call.ranks]

    def lose(self, rank: int, cause: str) -> None:
        """Note that a rank has ended: no call waits for it any longer."""
        for call in self._calls:
            if rank in call.ranks:
                call.lose(rank, cause)

    def _send(self, call: Call, rank: int, function: OnRank, arguments: tuple[object, ...]) -> None:
        engine = self.engine_of.get(rank, rank)

        def receive(kind: str, content: Any) -> None:
            match kind:
                case "result" if isinstance(content, BaseException):
                    call.lose(rank, lost(content))
                case "result":
                    call.inbox.put(Returned(rank=rank, value=content))
                case "events":
                    call.inbox.put(Events(rank=rank, batch=content))
                case "idle":
                    call.inbox.put(OutputEnded(rank=rank))
                case _:
                    call.inbox.put(Output(rank=rank, kind=kind, content=content))

        ipyparallel_internals.send(self.client, engine, function, list(arguments), receive)


def lost(error: BaseException) -> str:
    """Say why there is no result of a call."""
    if isinstance(error, RemoteError):
        return f"{error.ename}: {error.evalue}"
    return str(error)
