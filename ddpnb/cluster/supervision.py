"""Supervises a call until the call has ended on every rank.  Runs in the kernel.

ddpnb releases ranks that wait for a failed rank.  An interrupt or a timeout stops every rank,
even inside a collective.  If a rank still does not stop, ddpnb kills it and tells the user.
``HangDetector`` finds ranks that wait without end.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ddpnb.cluster.call import OUTPUT_TIMEOUT_SECONDS, Call, CallEvent, Lost, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import HangDetector, describe_hang
from ddpnb.cluster.interrupts import noted_interrupts, raise_if_interrupted
from ddpnb.cluster.wording import say, them, to_sentence
from ddpnb.protocol.calls import calls
from ddpnb.protocol.cell_messages import CellReport, Failure
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import spoken_ranks

MAX_ABORTS = 5
"""ddpnb kills hanging ranks after this number of releases.  Releases may fail on busy machines.

If gloo waits cannot end, the first release ends all other waits."""
END_TIMEOUT_SECONDS = 10.0
"""Maximum time to wait for the end of a call after ddpnb has killed ranks."""


def _nothing(*_: object) -> None: ...


@dataclass(kw_only=True, slots=True)
class Watch:
    """Supervises one call until it is done, and knows how the call ended."""

    cluster: Cluster
    call: Call
    handle: Callable[[CallEvent], None]
    tick: Callable[[], None] = _nothing
    """Function that draws the display.  It is called at least once every ``tick_seconds``."""
    timeout: float | None = None
    """Seconds after which ddpnb interrupts the ranks.  If None, there is no limit."""
    abort_after_failure_seconds: float | None = None
    """If not None, used instead of the cluster's timeout that has the same name."""
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    """Function that shows a sentence to the user while the call is still in progress."""
    dispensable: Collection[int] = ()
    """Ranks that may die while the other ranks continue."""
    stop_requested: bool = False
    is_stopping: bool = False
    """True once ddpnb has begun to interrupt the ranks."""
    timed_out: bool = False
    hang: str = ""
    """Where and why the ranks waited without end, or ``""``."""
    killed: set[int] = field(default_factory=set)
    """The ranks that ddpnb killed because they did not stop in any other way."""
    _failed_at: float = math.inf
    """Time at which the first rank failed or was lost."""
    _hangs: HangDetector = field(init=False)
    _num_aborts: int = 0
    _is_failure_shown: bool = False
    _is_loss_shown: bool = False

    def __post_init__(self) -> None:
        self._hangs = HangDetector(self.cluster, self.call)

    @property
    def failures(self) -> list[Failure]:
        """The failures that ranks have returned."""
        values = self.call.returned.values()
        found = [each.failure if isinstance(each, CellReport) else each for each in values]
        return [each for each in found if isinstance(each, Failure)]

    @property
    def lost(self) -> dict[int, str]:
        """Maps each dead rank that the other ranks need to the cause of its death."""
        lost = self.call.lost.items()
        return {rank: cause for rank, cause in lost if rank not in self.dispensable}

    def run(self) -> None:
        """Supervise the call until it has ended on every rank.

        Raises:
            KeyboardInterrupt: the kernel was interrupted, and the ranks have stopped.
            Exception: ``handle``, ``tick`` or ``notify`` failed, and the ranks have stopped.
        """
        with noted_interrupts():
            self.cluster.supervised.append(self.call)
            try:
                try:
                    self._supervise()
                except KeyboardInterrupt:
                    self._stop_ranks()
                    raise
            except Exception:
                self.handle = self.tick = self.notify = _nothing
                self._stop_ranks()
                raise
            finally:
                self.cluster.supervised.remove(self.call)

    def _supervise(self) -> None:
        deadline = time.monotonic() + (self.timeout or math.inf)
        while not self.call.done:
            self._attend()
            raise_if_interrupted()
            if (now := time.monotonic()) > deadline or self.stop_requested:
                self.timed_out = not self.stop_requested
                return self._stop_ranks()
            if self.call.running:
                self._attend_to_failure(now)
                self._attend_to_hang(now)
                if self.cluster.lost is not None and not self._is_loss_shown:
                    self._is_loss_shown = True
                    self.notify(self.cluster.remedy())
        if late := self.call.speaking:
            self.notify(
                f"The output of {spoken_ranks(late)} is incomplete. The rest did not arrive "
                f"within {OUTPUT_TIMEOUT_SECONDS:g} s after the ranks had finished."
            )
        if self.failures and not self._num_aborts:
            self._leave_broken_group()

    def _attend(self) -> None:
        for event in self.call.events(self.cluster.timeouts.tick_seconds):
            if isinstance(event, Returned | Lost) and (self.failures or self.lost):
                self._failed_at = min(self._failed_at, time.monotonic())
            self.handle(event)
        self.tick()

    def _attend_to_failure(self, now: float) -> None:
        """Release ranks that wait for a failed rank; show the failure if other ranks still run."""
        timeouts, running = self.cluster.timeouts, self.call.running
        seconds = self.abort_after_failure_seconds or timeouts.abort_after_failure_seconds
        if self.is_waited_for(now, seconds) and not self._num_aborts:
            self._abort()
        causes = self.causes()  # empty if a hang ended the call
        is_old = now - self._failed_at > timeouts.report_failure_after_seconds
        if causes and is_old and not self._is_failure_shown:
            self._is_failure_shown = True
            others = say(running, "is still running")
            self.notify(
                to_sentence(f"{causes}; {others}. Interrupt the cell to stop {them(running)}")
            )

    def is_waited_for(self, now: float, seconds: float) -> bool:
        """Return True if a rank has failed and no rank has ended in the last ``seconds``.

        The ranks that are still running may be waiting for the failed rank.
        """
        return self._failed_at < math.inf and now - self.call.ended_at > seconds

    def causes(self) -> str:
        """Describe the failures so far, except failures that another rank caused."""
        causes = [f"rank {rank} {cause}" for rank, cause in self.lost.items()]
        own = [each for each in self.failures if not each.is_consequence]
        return "; ".join([*causes, *(f"rank {f.rank} failed: {f.name}: {f.text}" for f in own)])

    def _attend_to_hang(self, now: float) -> None:
        """Release ranks that wait for each other without end, or kill them.  Name silent ranks."""
        waiting = self._hangs.poll(now)
        if notice := self._hangs.notice():
            self.notify(notice)
        if not waiting:
            return
        if not self._num_aborts:
            reports = self.call.returned.items()
            made = {rank: r.num_collectives for rank, r in reports if isinstance(r, CellReport)}
            idle = [rank for rank in self.cluster.ranks if rank not in self.call.ranks]
            self.hang = describe_hang(waiting, made, idle)
        if self._num_aborts < (MAX_ABORTS if self.cluster.can_release else 1):
            self._abort()
        else:
            self._kill()

    def _abort(self) -> None:
        self._num_aborts += 1
        self.cluster.abort(self.call.running)
        self._hangs = HangDetector(self.cluster, self.call)  # released ranks need time to notice

    def _stop_ranks(self) -> None:
        """Interrupt and release the ranks until they stop; kill ranks that do not stop."""
        self.is_stopping = True
        cluster, running, timeouts = self.cluster, self.call.running, self.cluster.timeouts
        kill_at = time.monotonic() + timeouts.kill_after_seconds
        while running and time.monotonic() < kill_at:
            # A rank that is suspended by SIGSTOP could not end the cell.
            cluster.processes.signal(running, signal.SIGCONT)
            cluster.interrupt(running)
            self._attend_until_done(timeouts.abort_after_interrupt_seconds)
            if running:
                cluster.abort(running)
            self._attend_until_done(timeouts.interrupt_again_after_seconds)
        if running:
            self._kill()
        self._attend_until_done(END_TIMEOUT_SECONDS)
        cluster.survivors |= self.killed & running
        self._leave_broken_group()

    def _kill(self) -> None:
        running = self.call.running
        why = "because they did not stop in any other way. Killed ranks lose their variables"
        self.notify(to_sentence(f"{say(running, 'was')} killed {why}"))
        self.killed |= running
        self.cluster.kill(running)

    def _leave_broken_group(self) -> None:
        """Abort the process group if the ranks have called different numbers of collectives.

        One rank may stop or fail before a collective, and another rank after this collective.
        """
        cluster = self.cluster
        if cluster.is_over:
            return
        ranks = [rank for rank in cluster.living if rank in self.call.returned]
        if any(failure.breaks_group for failure in self.failures):
            return cluster.abort(())
        made: dict[str, set[int | None]] = {}
        try:
            for answer in cluster.gather(calls.num_calls(), ranks, END_TIMEOUT_SECONDS):
                for group, number in answer.items():
                    made.setdefault(group, set()).add(number)
        except (RuntimeError, OSError, KeyError, UserError):  # a rank or the cluster has ended
            return
        if any(len(numbers) > 1 or None in numbers for numbers in made.values()):
            cluster.abort(ranks)

    def _attend_until_done(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.call.done and time.monotonic() < deadline:
            self._attend()
