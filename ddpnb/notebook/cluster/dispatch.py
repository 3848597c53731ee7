"""How does a call reach the ranks, and what comes back while it runs?  (Notebook side.)

ipyparallel carries it.  Its client hands every message from a rank to a callback
in its own thread; here they go into the call's queue, together with the results.
"""

import time
from collections.abc import Sequence
from typing import Any

import ipyparallel as ipp
from ipyparallel.error import RemoteError

from ddpnb.notebook.cluster.call import Call, Events, Lost, Output, OutputEnded, Returned
from ddpnb.remote_call import OnRank


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
            for happening in call.happenings(left):
                if isinstance(happening, Lost):
                    raise RuntimeError(f"rank {happening.rank}: {happening.cause}")
                if isinstance(happening, Returned):
                    values[happening.rank] = happening.value
        return [values[rank] for rank in call.ranks]

    def lose(self, rank: int, cause: str) -> None:
        """Note that a rank has ended: no call waits for it any longer."""
        for call in self._calls:
            if rank in call.ranks:
                call.lose(rank, cause)

    def _send(self, call: Call, rank: int, function: OnRank, arguments: tuple[object, ...]) -> None:
        engine = self.engine_of.get(rank, rank)
        future = self.client.send_apply_request(
            self.client._mux_stream,  # as DirectView does; a view has no hook for callbacks
            function,
            list(arguments),
            ident=self.client._engines[engine].encode(),
            message_future_hook=lambda future: hook(future, call, rank),
        )
        future.add_done_callback(lambda future: resolve(future, call, rank))


def hook(future: Any, call: Call, rank: int) -> None:
    """Have every output message of a request put in the call's queue."""

    def on_message(message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        metadata = future.output.metadata
        match kind:
            case "status":
                pass  # the output future below resolves on "idle"
            case "data_message":
                for batch in list(metadata["data"].values()):
                    call.inbox.put(Events(rank=rank, batch=batch))
                metadata["data"].clear()
            case _:
                metadata.update(stdout="", stderr="")  # taken over here: not kept twice
                call.inbox.put(Output(rank=rank, kind=kind, content=content))

    future.iopub_callbacks.append(on_message)
    future.output.add_done_callback(lambda _: call.inbox.put(OutputEnded(rank=rank)))


def resolve(future: Any, call: Call, rank: int) -> None:
    """Put a request's result in the call's queue."""
    value = future.exception() or future.result()
    if isinstance(value, RemoteError):
        call.lose(rank, f"{value.ename}: {value.evalue}")
    elif isinstance(value, BaseException):
        call.lose(rank, str(value))
    else:
        call.inbox.put(Returned(rank=rank, value=value))
