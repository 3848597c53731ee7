"""Who looks after a call until it has ended, one way or another?  (Notebook side.)

Ranks that wait for a rank which has failed are freed.  An interrupt or a timeout
reaches every rank, also inside a collective.  What does not end even then is
killed, and said.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddpnb.cluster.call import Call, CallEvent, Lost, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import StallDetector
from ddpnb.cluster.stopped import StoppedProcesses
from ddpnb.cluster.timeouts import Timeouts
from ddpnb.protocol.messages import CellReport, Failure
from ddpnb.protocol.rank_sets import format_ranks, spoken_ranks

MAX_ABORTS = 5
"""How often stuck ranks are freed before they are killed.

On a busy machine a freed rank may need seconds to leave its call.
"""


@dataclass(kw_only=True, slots=True)
class Watch:
    """Attends to one call until it is done.

    Args:
        cluster: where the call runs.
        call: the call.
        handle: takes each happening, in order.
        tick: called about every ``tick_seconds``, to draw.
        timeout: seconds after which the ranks are interrupted.
        free_after_seconds: how long ranks may still run after one has failed; by default
            as the cluster's timeouts say.
        notify: takes what the user should know before the call ends.
        survives: tells whether the others can do without a rank that has died just now.
    """

    cluster: Cluster
    call: Call
    handle: Callable[[CallEvent], None]
    tick: Callable[[], None]
    timeout: float | None = None
    free_after_seconds: float | None = None
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    survives: Callable[[int], bool] = lambda _: False
    timed_out: bool = False
    stuck: str = ""
    """Why the ranks waited for each other without end, if they did."""
    stop_requested: bool = False
    returned: dict[int, Any] = field(default_factory=dict)
    """What each rank returned."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that died during the call, with how."""
    _detector: StallDetector = field(init=False)
    _failed_at: float | None = None
    _num_aborts: int = 0
    _is_named: bool = False

    def __post_init__(self) -> None:
        self._detector = StallDetector(cluster=self.cluster, call=self.call)

    @property
    def _timeouts(self) -> Timeouts:
        return self.cluster.timeouts

    def run(self) -> None:
        """Return when every rank has ended the call.

        Raises:
            KeyboardInterrupt: after an interrupt, once the ranks have stopped.
        """
        deadline = time.monotonic() + self.timeout if self.timeout else None
        stopped = StoppedProcesses(cluster=self.cluster)
        try:
            while not self.call.done:
                self._attend(self._timeouts.tick_seconds)
                self._free_waiting()
                self._free_stuck()
                self._name_failed()
                if told := stopped.check(self.call.running):
                    self.notify(told)
                if self.stop_requested or (deadline and time.monotonic() > deadline):
                    self.timed_out = not self.stop_requested
                    return self._stop_ranks()
            self._leave_broken_group()
        except KeyboardInterrupt:
            self._stop_ranks()
            raise

    def _attend(self, seconds: float) -> None:
        for event in self.call.events(seconds):
            self._note(event)
            self.handle(event)
        self.tick()

    def _note(self, event: CallEvent) -> None:
        if isinstance(event, Returned):
            self.returned[event.rank] = event.value
        elif isinstance(event, Lost):
            self.lost[event.rank] = event.cause
        is_lost = any(not self.survives(rank) for rank in self.lost)
        failed = is_lost or any(map(failure_in, self.returned.values()))
        if self._failed_at is None and failed:
            self._failed_at = time.monotonic()

    def _free_waiting(self) -> None:
        """Cut the group under ranks that still run a while after one has failed."""
        if self._failed_at is None or self._num_aborts or not self.call.running:
            return
        seconds = self.free_after_seconds
        if seconds is None:
            seconds = self._timeouts.free_after_seconds
        if time.monotonic() - self._failed_at > seconds:
            self._abort()

    def _free_stuck(self) -> None:
        """Free ranks that wait for each other without end; kill those that cannot be freed."""
        if not self.call.running:
            return
        reports = self.returned.items()
        finished = {rank: r.num_collectives for rank, r in reports if isinstance(r, CellReport)}
        if why := self._detector.check(finished):
            if not self._num_aborts:
                self.stuck = why
            if self._num_aborts < MAX_ABORTS:
                self._abort()
            else:
                self._kill()

    def _name_failed(self) -> None:
        """Tell at once what failed where other ranks compute on, for who knows how long."""
        if self._failed_at is None or self._is_named or not self.call.running:
            return
        seconds = self._timeouts.name_after_seconds
        if time.monotonic() - self._failed_at > seconds:
            self._is_named = True
            causes = [f"rank {rank} {cause}" for rank, cause in self.lost.items()]
            for rank, value in self.returned.items():
                if (failure := failure_in(value)) and not failure.is_consequence:
                    causes.append(f"rank {rank} failed: {failure.name}: {failure.text}")
            who = spoken_ranks(self.call.running)
            self.notify(
                f"{'; '.join(causes)} ({who} still ran {seconds:g} s later; "
                "an interrupt ends such a cell)"
            )

    def _leave_broken_group(self) -> None:
        """Have the next call form a new group where the ranks' calls are out of step in this."""
        failures = map(failure_in, self.returned.values())
        if any(failure and failure.breaks_group for failure in failures) and not self._num_aborts:
            self._abort()

    def _abort(self) -> None:
        self._num_aborts += 1
        self.cluster.abort(tuple(self.call.running))
        self._detector.begin_anew()

    def _kill(self) -> None:
        who = format_ranks(self.call.running)
        self.notify(f"rank {who} could not be freed and is killed: its variables are lost")
        self.cluster.processes.signal(sorted(self.call.running), signal.SIGKILL)

    def _stop_ranks(self) -> None:
        """Interrupt the ranks until they stop; free, then kill, those that do not."""
        kill_at = time.monotonic() + self._timeouts.kill_after_seconds
        while self.call.running and time.monotonic() < kill_at:
            with contextlib.suppress(KeyboardInterrupt):  # a second one changes nothing
                self._urge()
        if self.call.running:
            self._kill()
        with contextlib.suppress(KeyboardInterrupt):  # now it means: do not wait any longer
            self._attend_until_done(self._timeouts.kill_after_seconds)

    def _urge(self) -> None:
        """Interrupt the ranks that run; free those that wait in a collective nevertheless.

        A rank that was stopped goes on: it could not end the cell, and would be killed.
        """
        self.cluster.processes.signal(sorted(self.call.running), signal.SIGCONT)
        self.cluster.interrupt(tuple(self.call.running))
        try:
            self._attend_until_done(self._timeouts.abort_after_seconds)
        finally:  # also where an impatient second interrupt comes
            if self.call.running:
                self.cluster.abort(tuple(self.call.running))
        self._attend_until_done(self._timeouts.interrupt_again_after_seconds)

    def _attend_until_done(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.call.done and time.monotonic() < deadline:
            self._attend(self._timeouts.tick_seconds)


def failure_in(value: object) -> Failure | None:
    """Return the failure that a rank reported, if it did."""
    if isinstance(value, Failure):
        return value
    return value.failure if isinstance(value, CellReport) else None
