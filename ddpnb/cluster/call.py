"""A call that runs on several ranks, and the timeouts of calls.  Runs in the kernel.

The results and the output of a call arrive in order, in one queue.
"""

import queue
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpnb.cluster.interrupts import raise_if_interrupted
from ddpnb.protocol.cell_messages import Prompt
from ddpnb.protocol.messages import EventBatch
from ddpnb.protocol.notation import spoken_ranks

START_TIMEOUT_SECONDS = 120.0
CALL_TIMEOUT_SECONDS = 30.0
"""Maximum time for an internal call of ddpnb."""
WAIT_SECONDS = 0.05
"""Maximum time to wait for an event before ddpnb looks for an interrupt."""
OUTPUT_TIMEOUT_SECONDS = 5.0
"""Maximum time to wait for the rest of a rank's output after the rank's result has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A message from a rank's output channel."""

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
    """A call in progress on one or several ranks."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        self.inbox: queue.Queue[CallEvent] = queue.Queue()
        """Queue of events.  After a signal, ``SimpleQueue.get`` might not return at its timeout."""
        self.running = set(self.ranks)
        """Ranks that have not returned."""
        self.speaking = set(self.ranks)
        """Ranks that may still send output.  Output can arrive after the rank's result."""
        self.returned: dict[int, Any] = {}
        """The results that have arrived, by rank."""
        self.lost: dict[int, str] = {}
        """Maps each dead rank to the cause of its death."""
        self.ended_at = 0.0
        """Time at which a rank last returned or died."""

    @property
    def done(self) -> bool:
        """True if every rank has finished and all output has arrived."""
        is_late = time.monotonic() > self.ended_at + OUTPUT_TIMEOUT_SECONDS
        return not self.running and (is_late or not self.speaking)

    def events(self, timeout: float) -> Iterator[CallEvent]:
        """Yield all events that have arrived; wait at most ``timeout`` seconds for the first."""
        while not self.done:
            try:
                event = self.inbox.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if self._takes(event):
                yield event

    def results(self, timeout: float = CALL_TIMEOUT_SECONDS) -> list[Any]:
        """Wait for this call without supervising it; return the results in the order of the ranks.

        Raises TimeoutError after ``timeout`` seconds.  Raises RuntimeError if a rank fails or dies.
        """
        deadline = time.monotonic() + timeout
        while self.running:
            if (left := deadline - time.monotonic()) <= 0:
                waiting = spoken_ranks(self.running)
                raise TimeoutError(f"{waiting} did not answer within {timeout:.0f} s")
            raise_if_interrupted()
            for event in self.events(min(left, WAIT_SECONDS)):
                if isinstance(event, Lost):
                    raise RuntimeError(f"rank {event.rank}: {event.cause}")
        return [self.returned[rank] for rank in self.ranks]

    def lose(self, rank: int, cause: str) -> None:
        """Record that a rank will not return a result.  Any thread may call this method."""
        self.inbox.put(Lost(rank=rank, cause=cause))

    def _takes(self, event: CallEvent) -> bool:
        """Record an event; return False for a rank's second result."""
        if isinstance(event, OutputEnded):
            self.speaking.discard(event.rank)
        elif isinstance(event, Returned | Lost):
            if event.rank not in self.running:  # if it is lost, so may be its last output
                return False
            self.running.remove(event.rank)
            self.ended_at = time.monotonic()
            if isinstance(event, Returned):
                self.returned[event.rank] = event.value
            else:
                self.lost[event.rank] = event.cause
                self.speaking.discard(event.rank)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Times after which ddpnb polls, interrupts, releases or kills the ranks of a call."""

    tick_seconds: float = 0.05
    """Maximum time to wait for a call's next event.  ddpnb redraws the display after each wait."""
    abort_after_failure_seconds: float = 0.3
    """After a rank fails or ends, ddpnb waits for this time before it releases the other ranks.

    ddpnb waits because the other ranks may be about to fail too.
    """
    abort_validation_after_seconds: float = 5.0
    """Used instead of ``abort_after_failure_seconds`` in calls that ``ask`` makes.  After a
    release, the ranks must form a new process group, which takes time."""
    report_failure_after_seconds: float = 0.8
    """Time after which ddpnb shows a failure even if other ranks are still running."""
    abort_after_interrupt_seconds: float = 0.3
    """Time between an interrupt and the release of a rank from its collective."""
    interrupt_again_after_seconds: float = 1.2
    """Time between a release and the next interrupt.  Code may catch the first interrupt."""
    kill_after_seconds: float = 10.0
    """Time after which ddpnb kills a rank if interrupts and releases have not stopped the rank."""
    poll_seconds: float = 0.8
    """Time between two position reports of a rank.  Two reports per second slow training by 1 %."""
    hang_after_seconds: float = 2.0
    """Time for which idle ranks must wait for each other before the call counts as a hang."""
    longest_gap_seconds: float = 1.0
    """Maximum time between two reports that counts as waiting.  The reports may be further apart,
    because a laptop has slept or because a report has arrived late on a busy machine."""
    silent_after_seconds: float = 10.0
    """Time after which ddpnb tells the user that a rank does not report its position."""
