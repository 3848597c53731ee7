"""A call on several ranks, while it is in progress, and its timeouts (kernel).

All results and output of a call arrive in one queue, in order.
"""

import math
import queue
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpnb.protocol.messages import EventBatch, Prompt
from ddpnb.protocol.notation import spoken_ranks

START_TIMEOUT_SECONDS = 120.0
CALL_TIMEOUT_SECONDS = 30.0
"""Longest time for ddpnb's internal calls."""
OUTPUT_TIMEOUT_SECONDS = 5.0
"""Longest delay of a rank's last output after the rank's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A message of a rank's output channel."""

    rank: int
    kind: str
    """Jupyter's message type: ``"stream"``, ``"display_data"``, ``"execute_result"``, ..."""
    content: dict[str, Any]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEnded:
    """All output of a rank has arrived.  The rank's result may still be missing."""

    rank: int


CallEvent = Output | EventBatch | Prompt | Returned | Lost | OutputEnded


class Call:
    """One call on several ranks, in progress."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        self.inbox: queue.Queue[CallEvent] = queue.Queue()
        """Not a ``SimpleQueue``, because a signal can make ``SimpleQueue.get`` miss its timeout."""
        self.running = set(self.ranks)
        """Ranks that have not returned."""
        self.speaking = set(self.ranks)
        """Ranks with unfinished output.  Output may end after the result has arrived."""
        self._output_deadline = math.inf

    @property
    def done(self) -> bool:
        """True if every rank has finished and all output has arrived."""
        output_ended = not self.speaking or time.monotonic() > self._output_deadline
        return not self.running and output_ended

    def events(self, timeout: float) -> Iterator[CallEvent]:
        """Yield the events so far; wait up to ``timeout`` seconds for the first event."""
        while not self.done:
            try:
                event = self.inbox.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if self._takes(event):
                yield event

    def results(self, timeout: float = CALL_TIMEOUT_SECONDS) -> list[Any]:
        """Wait for an internal call, without supervision; return the results in order of ranks.

        Raises TimeoutError, or RuntimeError if a rank died or the call failed on a rank.
        """
        deadline = time.monotonic() + timeout
        values: dict[int, Any] = {}
        while self.running:
            if (left := deadline - time.monotonic()) <= 0:
                waiting = spoken_ranks(self.running)
                raise TimeoutError(f"no answer within {timeout:.0f} s from {waiting}")
            for event in self.events(left):
                if isinstance(event, Lost):
                    raise RuntimeError(f"rank {event.rank}: {event.cause}")
                if isinstance(event, Returned):
                    values[event.rank] = event.value
        return [values[rank] for rank in self.ranks]

    def lose(self, rank: int, cause: str) -> None:
        """Note that a rank will not return.  Any thread may call this."""
        self.inbox.put(Lost(rank=rank, cause=cause))

    def _takes(self, event: CallEvent) -> bool:
        """Update ``running`` and ``speaking`` after an event; return False if it is obsolete."""
        if isinstance(event, OutputEnded | Lost):
            self.speaking.discard(event.rank)
        if isinstance(event, Returned | Lost):
            if event.rank not in self.running:
                return False
            self.running.remove(event.rank)
            self._output_deadline = time.monotonic() + OUTPUT_TIMEOUT_SECONDS
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The times after which a running call is polled, reported, released and killed."""

    tick_seconds: float = 0.05
    """The longest wait for a call's next event.  The display is drawn between waits."""
    abort_after_failure_seconds: float = 0.3
    """Time after a failure and after the latest end of a rank until the other ranks are released.

    The other ranks may be about to fail too.
    """
    abort_validation_after_seconds: float = 5.0
    """Like ``abort_after_failure_seconds``, for calls of ``ask``, where a release costs more."""
    report_failure_after_seconds: float = 0.8
    """Time after which a failure is shown although other ranks still run."""
    abort_after_interrupt_seconds: float = 0.3
    """Time after an interrupt until a rank is released from its collective."""
    interrupt_again_after_seconds: float = 1.2
    """Time from a release to the next interrupt.  Code may have caught the first interrupt."""
    kill_after_seconds: float = 10.0
    """Time after which an interrupted and released rank is killed."""
    poll_seconds: float = 0.8
    """Time between a rank's position reports.  Two reports per second slowed training by 1 %."""
    hang_after_seconds: float = 2.0
    """Time that ranks must have waited for each other, idle, before the call counts as a hang."""
    longest_gap_seconds: float = 1.0
    """The longest time between two reports that counts as waiting.  A laptop may have slept, and on
    a busy machine a report may arrive late."""
    silent_after_seconds: float = 10.0
    """Time after which the user is told that a rank does not report its position."""
