"""A call on several ranks, while it is in progress, and its timeouts (kernel).

Everything that comes back goes into one queue per call, in order.
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
"""How long a call may take that only this package makes."""
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
    """All output of a rank has come; its result may still be missing."""

    rank: int


CallEvent = Output | EventBatch | Prompt | Returned | Lost | OutputEnded


class Call:
    """One call on several ranks, in progress."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        self.inbox: queue.Queue[CallEvent] = queue.Queue()
        """Not a ``SimpleQueue``: its ``get`` may miss the end of its time when a signal arrives."""
        self.running = set(self.ranks)
        """Ranks that have not returned."""
        self.speaking = set(self.ranks)
        """Ranks whose output has not ended; it may end after the result has come."""
        self._output_deadline = math.inf

    @property
    def done(self) -> bool:
        """Whether every rank has finished and all its output is here."""
        output_ended = not self.speaking or time.monotonic() > self._output_deadline
        return not self.running and output_ended

    def events(self, timeout: float) -> Iterator[CallEvent]:
        """Yield what has happened, waiting up to ``timeout`` seconds for the first event."""
        while not self.done:
            try:
                event = self.inbox.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if self._takes(event):
                yield event

    def results(self, timeout: float = CALL_TIMEOUT_SECONDS) -> list[Any]:
        """Wait, unsupervised, for a call that ddpnb alone makes; return the results in order.

        Raises a TimeoutError, or a RuntimeError if a rank died or the call itself failed there.
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
        """Note, from any thread, that a rank will not return."""
        self.inbox.put(Lost(rank=rank, cause=cause))

    def _takes(self, event: CallEvent) -> bool:
        """Note what an event ends; return whether it is news."""
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
    """When a running call is polled, named, freed and killed."""

    tick_seconds: float = 0.05
    """The longest wait for a call's next event; the display is drawn in between."""
    abort_after_failure_seconds: float = 0.3
    """How long ranks may still run, once one has failed, after the last one that ended.

    They may be about to fail too.
    """
    abort_validation_after_seconds: float = 5.0
    """Like ``abort_after_failure_seconds``, where freeing costs more: for calls of ``ask``."""
    report_failure_after_seconds: float = 0.8
    """When a failure is shown while other ranks still run: they compute, or the machine is busy."""
    abort_after_interrupt_seconds: float = 0.3
    """How long an interrupted rank may take before it is freed from its collective."""
    interrupt_again_after_seconds: float = 1.2
    """How long a freed rank may take until the next interrupt; it may have caught the first."""
    kill_after_seconds: float = 10.0
    """How long an interrupted and freed rank may take before it is killed."""
    poll_seconds: float = 0.8
    """How often up to eight ranks report where they are; twice a second cost a training 1 %."""
    hang_after_seconds: float = 2.0
    """How long ranks must have waited for each other, idle, before the call counts as a hang."""
    longest_gap_seconds: float = 1.0
    """The most that the time between two reports counts towards that: a laptop may have slept, and
    on a busy machine one report is soon made and late to come."""
    silent_after_seconds: float = 10.0
    """When a rank that does not report where it is, is named."""
