"""Restarts dead ranks while the other ranks continue to train.  Runs in the kernel.

ddpnb restarts a dead rank without a process group, and the rank joins the run at the current
step.  On several hosts, ddpnb does not restart dead ranks until the run has ended.  After the
run, all ranks form a new process group.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ddpnb.cluster.call import Call, CallEvent, Lost, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.processes import wait_until
from ddpnb.protocol.calls import calls
from ddpnb.protocol.cell_messages import Failure
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch, Mark, MarkKind, RejoinInfo, RunSpec
from ddpnb.results.rows import rows_of

KERNEL = -1
"""Used instead of a rank's number in marks that the kernel itself sends."""
MAX_STARTS = 3
"""Maximum number of restarts of one rank during one run."""
TIMEOUT_SECONDS = 60.0
"""Maximum time to wait for restarted ranks after all other ranks have finished the run."""
INTERRUPT_SECONDS = 3.0
"""Maximum time to wait for restarted ranks that have been interrupted."""


@dataclass(kw_only=True, slots=True)
class RankRecovery:
    """Restarts dead ranks during one run, and calls ``handle`` for each event and mark."""

    cluster: Cluster
    spec: RunSpec
    handle: Callable[[CallEvent], None]
    dispensable: Collection[int]
    """Ranks that may die while the other ranks continue the run."""
    before_joining: Callable[[int], None] = lambda _: None
    """Function that prepares a restarted rank before the rank joins the run."""
    restarted: Counter[int] = field(default_factory=Counter)
    """The number of restarts of each rank during the run."""
    _began_at: float = float("inf")
    _num_batches: dict[int, int] = field(default_factory=dict)
    _num_steps: dict[int, int] = field(default_factory=dict)
    _starting: set[int] = field(default_factory=set)
    _calls: dict[int, Call] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)
    """Ranks that ``--kill`` has killed.  These ranks had already sent all their events."""
    _dead: set[int] = field(default_factory=set)
    _training_again: set[int] = field(default_factory=set)

    def take(self, event: CallEvent) -> None:
        """Handle an event from a rank that has not been restarted, and record dead ranks."""
        self._note(event)
        self.handle(event)
        if isinstance(event, Lost) and event.rank in self.dispensable:
            self._dead.add(event.rank)

    def attend(self) -> None:
        """Restart dead ranks, let restarted ranks join the run, and handle their events."""
        for rank in sorted(self._dead):
            if rank in self.cluster.exits:  # the call may be lost before the exit is reported
                self._dead.discard(rank)
                self._start(rank)
        for rank in sorted(self._starting - self.cluster.starting):
            self._starting.discard(rank)
            if rank in self.cluster.exits:
                self._dead.add(rank)
            else:
                self._join(rank)
        for rank, call in list(self._calls.items()):
            for event in call.events(0.0):
                self._take_joined(rank, event)

    def end(self) -> None:
        """Wait until restarted ranks have finished the run; kill ranks that take too long."""
        self._wait(TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Interrupt restarted ranks that train; kill ranks that do not stop."""
        self._dead.clear()
        self._starting.clear()  # a rank that starts does not disturb the next call
        self.cluster.interrupt([rank for rank, call in self._calls.items() if not call.done])
        self._wait(INTERRUPT_SECONDS)

    def _wait(self, seconds: float) -> None:
        try:
            wait_until(self._is_over, seconds, "not ended")
        except TimeoutError:
            late = [rank for rank, call in self._calls.items() if not call.done]
            self.cluster.kill([*self._starting, *late])

    def _is_over(self) -> bool:
        self.attend()
        is_done = not self._starting and all(call.done for call in self._calls.values())
        return is_done or self.cluster.lost is not None

    def _note(self, event: CallEvent) -> None:
        if not isinstance(event, EventBatch):
            return
        rank = event.rank
        if event.num_steps:
            last = rows_of(event)[-1]
            self._began_at = min(self._began_at, time.time() - float(last["seconds"]))
            self._num_steps[rank] = int(last["step"]) + 1
        self._num_batches[rank] = event.sequence + 1
        if any(mark.kind is MarkKind.KILLED for mark in event.marks):
            self._killed.add(rank)
            self.cluster.kill([rank])

    def _start(self, rank: int) -> None:
        exit_ = self.cluster.exits[rank]
        if rank in self._killed:
            self._killed.remove(rank)
        else:
            kind = MarkKind.KILLED if (exit_.code or 0) < 0 else MarkKind.DIED
            self._send(Mark(rank=rank, seconds=self._now(), kind=kind))
        self._training_again.discard(rank)
        if self.cluster.spans_hosts:  # the rank could not join; its host may be lost
            return
        if self.restarted[rank] < MAX_STARTS:
            self.cluster.restart_alone(rank)
            self.restarted[rank] += 1
            self._starting.add(rank)

    def _join(self, rank: int) -> None:
        rejoin_info = RejoinInfo(
            first_batch=self._num_batches.get(rank, 0),
            first_step=self._num_steps.get(rank, 0),
            began_at=min(self._began_at, time.time()),
        )
        with contextlib.suppress(UserError):  # the rank died again; the next `attend` notes this
            self.before_joining(rank)
            self._calls[rank] = self.cluster.submit(calls.train(self.spec, rejoin_info), [rank])

    def _take_joined(self, rank: int, event: CallEvent) -> None:
        is_first = rank not in self._training_again
        if isinstance(event, Lost):
            self._dead.add(rank)
        elif isinstance(event, Returned) and isinstance(event.value, Failure) and is_first:
            text = f"did not come back: {event.value.name}"
            self._send(Mark(rank=rank, seconds=self._now(), text=text))
        elif isinstance(event, EventBatch) and event.num_steps and is_first:
            self._training_again.add(rank)
            seconds = float(rows_of(event)[0]["seconds"])
            self._send(Mark(rank=rank, seconds=seconds, kind=MarkKind.CAME_BACK))
        self._note(event)
        self.handle(event)

    def _now(self) -> float:
        """Return the time since the run began, in seconds."""
        return max(0.0, time.time() - self._began_at)

    def _send(self, mark: Mark) -> None:
        """Send a mark from the kernel."""
        number = self._num_batches.get(KERNEL, 0)
        self._num_batches[KERNEL] = number + 1
        run_id = self.spec.run_id
        self.handle(EventBatch(run_id=run_id, rank=KERNEL, sequence=number, marks=(mark,)))
