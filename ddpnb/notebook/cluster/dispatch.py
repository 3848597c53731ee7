"""How does a call reach the ranks, and what comes back while it runs?  (Notebook side.)

ipyparallel carries it.  Its client hands every message from a rank to a callback
in its own thread; here they are put in one queue per call, in order, together
with the results, so that whoever waits wakes at once and looks nowhere else.
"""

import math
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ipyparallel as ipp
from ipyparallel.error import RemoteError

from ddpnb.wire import EventBatch, OnRank

OUTPUT_TIMEOUT_SECONDS = 5.0
"""How long a rank's last output may come after its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A message of a rank's output channel."""

    rank: int
    kind: str
    """``"stream"``, ``"display_data"``, ``"execute_result"``, ... as Jupyter names it."""
    content: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Training events that a rank flushed."""

    rank: int
    batch: EventBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A rank has finished the call."""

    rank: int
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A rank will never finish the call."""

    rank: int
    cause: str


Happening = Output | Events | Returned | Lost


@dataclass(kw_only=True, slots=True)
class Call:
    """One call on several ranks, in progress."""

    ranks: tuple[int, ...]
    inbox: "queue.SimpleQueue[tuple[int, str, Any]]" = field(default_factory=queue.SimpleQueue)
    running: set[int] = field(init=False)
    """Ranks whose result is still to come."""
    speaking: set[int] = field(init=False)
    """Ranks whose output has not ended yet; it may end after the result has come."""
    output_deadline: float = math.inf

    def __post_init__(self) -> None:
        self.running = set(self.ranks)
        self.speaking = set(self.ranks)

    @property
    def done(self) -> bool:
        """Whether every rank has finished and all its output is here."""
        output_ended = not self.speaking or time.monotonic() > self.output_deadline
        return not self.running and output_ended

    def happenings(self, timeout: float) -> Iterator[Happening]:
        """Yield what has happened, waiting up to ``timeout`` seconds for the first."""
        while not self.done:
            try:
                rank, kind, content = self.inbox.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            yield from self._handle(rank, kind, content)

    def lose(self, rank: int, cause: str) -> None:
        """Note, from any thread, that a rank will not answer any more."""
        self.inbox.put((rank, "lost", cause))

    def _handle(self, rank: int, kind: str, content: Any) -> Iterator[Happening]:
        match kind:
            case "idle":
                self.speaking.discard(rank)
            case "result":
                yield from self._finish(rank, Returned(rank=rank, value=content))
            case "lost":
                self.speaking.discard(rank)
                yield from self._finish(rank, Lost(rank=rank, cause=content))
            case "events":
                yield Events(rank=rank, batch=content)
            case _:
                yield Output(rank=rank, kind=kind, content=content)

    def _finish(self, rank: int, happening: Happening) -> Iterator[Happening]:
        if rank in self.running:
            self.running.remove(rank)
            self.output_deadline = time.monotonic() + OUTPUT_TIMEOUT_SECONDS
            yield happening


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
        call = self.submit(function, *arguments, ranks=ranks)
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
        return [values[rank] for rank in ranks]

    def lose(self, rank: int, cause: str) -> None:
        """Note that a rank has ended: no call waits for it any longer."""
        for call in self._calls:
            if rank in call.ranks:
                call.lose(rank, cause)

    def _send(self, call: Call, rank: int, function: OnRank, arguments: tuple[object, ...]) -> None:
        engine = self.engine_of.get(rank, rank)
        future = self.client.send_apply_request(
            self.client._mux_socket,  # as DirectView does; a view has no hook for callbacks
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
                    call.inbox.put((rank, "events", batch))
                metadata["data"].clear()
            case _:
                metadata.update(stdout="", stderr="")  # taken over here: not kept twice
                call.inbox.put((rank, kind, content))

    future.iopub_callbacks.append(on_message)
    future.output.add_done_callback(lambda _: call.inbox.put((rank, "idle", None)))


def resolve(future: Any, call: Call, rank: int) -> None:
    """Put a request's result in the call's queue."""
    value = future.exception() or future.result()
    if isinstance(value, RemoteError):
        call.inbox.put((rank, "lost", f"{value.ename}: {value.evalue}"))
    elif isinstance(value, BaseException):
        call.inbox.put((rank, "lost", str(value)))
    else:
        call.inbox.put((rank, "result", value))
