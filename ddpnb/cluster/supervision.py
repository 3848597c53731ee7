"""The supervision of a call until it has ended, one way or another (kernel).

Ranks that wait for a failed rank are freed.  An interrupt or a timeout reaches every
rank, also inside a collective.  A rank that does not stop even then is killed, and the
user is notified.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from IPython.core.getipython import get_ipython

from ddpnb.cluster.call import Call, CallEvent, Lost, Returned, Timeouts
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import HangDetector, StopDetector
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import CellReport, Failure
from ddpnb.protocol.notation import spoken_ranks

MAX_ABORTS = 5
"""How often hanging ranks are freed before they are killed: a busy machine may need several."""
END_TIMEOUT_SECONDS = 10.0
"""How long a call with killed ranks may take to end."""
OBEYED_SECONDS = 30.0
"""If a noted interrupt has had no effect for so long, the next one is raised at once, anywhere."""
IMPATIENCE_SECONDS = 1.0
"""How long further interrupts are ignored once an interrupted call has ended."""


@dataclass(kw_only=True, slots=True)
class Watch:
    """Supervises one call until it is done.

    Args:
        cluster: where the call runs.
        call: the call.
        handle: takes each event, in order.
        tick: called at least every ``tick_seconds``, to draw.
        timeout: seconds after which the ranks are interrupted.
        abort_after_failure_seconds: how long ranks may still run, once one has failed, after the
            last one ended; by default as the cluster's timeouts say.
        notify: shows the user a sentence before the call ends.
        survives: returns whether the other ranks can go on without one that has died.
    """

    cluster: Cluster
    call: Call
    handle: Callable[[CallEvent], None]
    tick: Callable[[], None]
    timeout: float | None = None
    abort_after_failure_seconds: float | None = None
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    survives: Callable[[int], bool] = lambda _: False
    timed_out: bool = False
    hang: str = ""
    """Why the ranks waited for each other without end, if they did."""
    stop_requested: bool = False
    is_stopping: bool = False
    """Whether the ranks are being interrupted, and killed after a while."""
    returned: dict[int, Any] = field(default_factory=dict)
    """What each rank returned."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that died during the call, each with the cause."""
    _detector: HangDetector = field(init=False)
    is_settled: bool = False
    """Whether ``run`` has ended: no abort of the group will follow."""
    _failed_at: float | None = None
    """When the first rank failed."""
    _last_end_at: float | None = None
    """When the last rank so far returned or died, once one has failed."""
    _num_aborts: int = 0
    _is_reported: bool = False

    def __post_init__(self) -> None:
        self._detector = HangDetector(cluster=self.cluster, call=self.call)

    @property
    def _timeouts(self) -> Timeouts:
        return self.cluster.timeouts

    def run(self) -> None:
        """Return when the call has ended on every rank.

        Raises:
            KeyboardInterrupt: the kernel was interrupted, and the ranks have stopped.
            Exception: ``handle``, ``tick`` or ``notify`` failed, and the ranks have stopped.
        """
        with noted_interrupts() as is_interrupted:
            try:
                try:
                    self._supervise(is_interrupted)
                except KeyboardInterrupt:
                    self._stop_ranks()
                    raise
            except Exception:
                self.handle, self.tick, self.notify = _nothing, _nothing, _nothing
                self._stop_ranks()
                raise
            finally:
                self.is_settled = True

    def _supervise(self, is_interrupted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout if self.timeout else None
        stopped = StopDetector(cluster=self.cluster)
        while not self.call.done:
            self._attend(self._timeouts.tick_seconds)
            if is_interrupted():
                raise KeyboardInterrupt
            self._abort_after_failure()
            self._abort_hanging()
            self._report_failed()
            if sentence := stopped.check(self.call.running) or self._detector.name_silent():
                self.notify(sentence)
            if self.stop_requested or (deadline and time.monotonic() > deadline):
                self.timed_out = not self.stop_requested
                return self._stop_ranks()
        self._leave_broken_group()

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
        if failed and isinstance(event, Returned | Lost):
            self._last_end_at = time.monotonic()
            self._failed_at = self._failed_at or self._last_end_at

    def _abort_after_failure(self) -> None:
        """Free ranks that still run a while after the last other ended, if one of those failed.

        They may wait for it.
        """
        if self._last_end_at is None or self._num_aborts or not self.call.running:
            return
        seconds = self.abort_after_failure_seconds
        if seconds is None:
            seconds = self._timeouts.abort_after_failure_seconds
        if time.monotonic() - self._last_end_at > seconds:
            self._abort()

    def _abort_hanging(self) -> None:
        """Free ranks that wait for each other without end; kill them when that fails repeatedly."""
        if not self.call.running:
            return
        reports = self.returned.items()
        finished = {rank: r.num_collectives for rank, r in reports if isinstance(r, CellReport)}
        if why := self._detector.check(finished):
            if not self._num_aborts:
                links = self.cluster.processes.unreachable()
                self.hang = f"{why}; {links}" if links else why
            if self._num_aborts < MAX_ABORTS:
                self._abort()
            else:
                self._kill()

    def _report_failed(self) -> None:
        """Show what failed while other ranks compute on, which may take any time."""
        if self._failed_at is None or self._is_reported or not self.call.running:
            return
        seconds = self._timeouts.report_failure_after_seconds
        if time.monotonic() - self._failed_at > seconds:
            self._is_reported = True
            causes = [f"rank {rank} {cause}" for rank, cause in self.lost.items()]
            for rank, value in self.returned.items():
                if (failure := failure_in(value)) and not failure.is_consequence:
                    causes.append(f"rank {rank} failed: {failure.name}: {failure.text}")
            others = spoken_ranks(self.call.running)
            self.notify(
                f"{'; '.join(causes)} ({others} still ran {seconds:g} s later; "
                "an interrupt ends such a cell)"
            )

    def _leave_broken_group(self) -> None:
        """Have the next call form a new group if a failure leaves collectives out of step."""
        failures = [each for each in map(failure_in, self.returned.values()) if each is not None]
        if not failures or self._num_aborts:
            return
        if any(each.breaks_group for each in failures):
            self._abort()
        else:
            self._leave_group_out_of_step()

    def _abort(self) -> None:
        self._num_aborts += 1
        self.cluster.abort(tuple(self.call.running))
        self._detector.reset()

    def _kill(self) -> None:
        ranks = spoken_ranks(self.call.running)
        self.notify(f"{ranks} could not be freed: killed, and their variables are lost")
        self.cluster.processes.signal(sorted(self.call.running), signal.SIGKILL)

    def _stop_ranks(self) -> None:
        """Interrupt and free the ranks until they stop; kill those that do not."""
        self.is_stopping = True
        kill_at = time.monotonic() + self._timeouts.kill_after_seconds
        while self.call.running and time.monotonic() < kill_at:
            self._interrupt_and_free()
        if self.call.running:
            self._kill()
        self._attend_until_done(END_TIMEOUT_SECONDS)
        self._leave_group_out_of_step()

    def _leave_group_out_of_step(self) -> None:
        """Have the next call form a new group if it would meet what one rank has called alone.

        A stop or a failure may come before a collective on one rank and after it on another.
        """
        if self.cluster.is_over:
            return
        stopped = [rank for rank in self.cluster.living if rank in self.returned]
        made: dict[str, set[int | None]] = {}
        try:
            answers = self.cluster.submit(calls.num_calls(), stopped)
            for answer in answers.results(END_TIMEOUT_SECONDS):
                for group, number in answer.items():
                    made.setdefault(group, set()).add(number)
        except (RuntimeError, OSError, KeyError, UserError):  # a rank, or the cluster, has ended
            return
        if any(len(numbers) > 1 or None in numbers for numbers in made.values()):
            self.cluster.abort(stopped)

    def _interrupt_and_free(self) -> None:
        """Interrupt the running ranks; free those that keep waiting in a collective.

        Ranks that received SIGSTOP are continued: else they could not end the cell.
        """
        self.cluster.processes.signal(sorted(self.call.running), signal.SIGCONT)
        self.cluster.interrupt(tuple(self.call.running))
        self._attend_until_done(self._timeouts.abort_after_interrupt_seconds)
        if self.call.running:
            self.cluster.abort(tuple(self.call.running))
        self._attend_until_done(self._timeouts.interrupt_again_after_seconds)

    def _attend_until_done(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.call.done and time.monotonic() < deadline:
            self._attend(self._timeouts.tick_seconds)


def _nothing(*shown: object) -> None: ...


def failure_in(value: object) -> Failure | None:
    """Return the failure in what a rank returned, if there is one."""
    if isinstance(value, Failure):
        return value
    return value.failure if isinstance(value, CellReport) else None


class _SigintHandler:
    """Notes an interrupt for the call that is supervised; raises it where none is, or none obeys.

    An interrupt that is raised wherever the kernel happens to be could end a message halfway.  A
    second one, sent in impatience, could hit IPython while it shows the error, or ipykernel while
    it replies, and the client would wait without end: it is raised in a cell's code only.
    """

    is_supervising = False
    is_interrupted = False
    raises_from = 0.0
    """In ``time.monotonic()``."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_supervising and not self.is_interrupted:
            self.is_interrupted = True
            self.raises_from = time.monotonic() + OBEYED_SECONDS
        elif time.monotonic() >= self.raises_from + (0 if in_cell(frame) else OBEYED_SECONDS):
            signal.default_int_handler(number, frame)


def in_cell(frame: FrameType | None) -> bool:
    """Return whether a cell's code has led to a frame; outside of IPython every frame counts."""
    shell = get_ipython()
    while shell is not None and frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back
    return frame is not None


_handler = _SigintHandler()


@contextlib.contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Note interrupts in place of raising them; yield whether there was one.

    Ipykernel sets its own handler at each cell.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others get no interrupts
    if not is_main or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _handler):
        yield lambda: False
        return
    _handler.is_interrupted, _handler.raises_from = False, 0.0
    _handler.is_supervising = True
    signal.signal(signal.SIGINT, _handler)
    try:
        yield lambda: _handler.is_interrupted
    finally:
        _handler.is_supervising = False
        _handler.raises_from = time.monotonic() + _handler.is_interrupted * IMPATIENCE_SECONDS
