"""How does a comparison train while the notebook goes on?  (Notebook side.)

A thread attends to it; what it draws appears where it was started, because the
thread runs in a copy of that cell's context.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import Watch
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.rank_sets import format_ranks, spoken_ranks
from ddpnb.protocol.remote_call import OnRank
from ddpnb.reports.progress import Progress, progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.cells import RunningCell
from ddpnb.session.comparison import Training
from ddpnb.session.errors import CellInterrupt, told
from ddpnb.session.status import Running

STOP_TIMEOUT_SECONDS = 15.0
"""How long a comparison that was told to stop may take; its ranks are killed before that."""


@final
class RunningComparison:
    """A comparison that trains in the background.

    Args:
        prepare: makes it ready and checks it; called in the thread.
        ranks: the ranks that it keeps busy.
        ended: called in the thread, once all is over, with this object.
    """

    def __init__(
        self,
        prepare: Callable[[], Training],
        ranks: Sequence[int] = (),
        *,
        ended: Callable[["RunningComparison"], None] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.error: BaseException | None = None
        """Why it ended early, once it has."""
        self._prepare = prepare
        self._ended = ended or _tell
        self._training: Training | None = None
        self._result: ComparisonResult | None = None
        self._is_stopped = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run,), name="ddpnb-compare"
        )
        self._thread.daemon = True
        self._begun = time.strftime("%H:%M:%S")

    def begin(self) -> None:
        """Train from now on."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._is_over.is_set()

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._is_stopped.is_set()

    @property
    def was_stopped(self) -> bool:
        """Whether it has ended because it was told to, and not for a fault."""
        return self.is_stopped and (self.error is None or isinstance(self.error, CellInterrupt))

    def interrupt(self) -> None:
        """Stop it: the run that trains ends, those to come are left out; again is no harm."""
        self._is_stopped.set()
        if self._training is not None:
            self._training.stop()

    def stop(self) -> None:
        """Stop it and wait until its ranks are free; again is no harm."""
        self.interrupt()
        self._thread.join(STOP_TIMEOUT_SECONDS)

    def wait(self, timeout: float | None = None) -> ComparisonResult:
        """Wait until it has ended; return the result, or raise what it failed with.

        Args:
            timeout: in seconds; the comparison goes on after it.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the comparison still trains after {timeout} s")
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def result(self) -> ComparisonResult:
        """What it has shown so far.

        Raises:
            UserError: nothing has trained yet.
        """
        if self._result is not None:
            return self._result
        if self._training is None:
            raise UserError("The comparison has trained nothing yet.")
        return ComparisonResult(self._training.recorder.comparison)

    def progress(self) -> Progress | None:
        """Return how far it is; None before it trains."""
        training = self._training
        return None if training is None else progress_of(training.recorder.comparison)

    @property
    def name(self) -> str:
        """What its runs are stored under; empty before it trains."""
        return "" if self._training is None else self._training.recorder.comparison.name

    def __repr__(self) -> str:
        """Say what stays right under the cell that showed it: how it ended, or when it began."""
        if not self.done:
            return f"<comparison, begun {self._begun}; %ddp_status tells how far it is>"
        ending = "stopped" if self.was_stopped else "failed" if self.error else "finished"
        return f"<comparison: {ending}>"

    def _run(self) -> None:
        try:
            self._training = self._prepare()
            if self.is_stopped:
                self._training.stop()
            self._result = self._training.run()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  for wait(), told now
            self.error = error
        self._is_over.set()  # first, so that who is told may begin the next at once
        self._ended(self)


def _tell(running: RunningComparison) -> None:
    """Say under the cell that started it why a comparison ended early."""
    if running.error is not None and not isinstance(running.error, CellInterrupt):
        print(told(running.error))


IDLE_SECONDS = 2.0
"""A rank that does not answer in this time is at something."""


class OrphanedCall:
    """What runs on ranks since before this kernel; it is attended to, as any cell.

    Args:
        cluster: where it runs.
        ranks: the ranks that are at it.
    """

    def __init__(self, cluster: Cluster, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._watch = Watch(
            cluster=cluster,
            call=cluster.submit(OnRank("state"), ranks=ranks),
            handle=lambda _: None,
            tick=lambda: None,
        )
        here = contextvars.copy_context()  # knows which cell output belongs to
        self._thread = threading.Thread(target=here.run, args=(self._run,), daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether every rank has ended it."""
        return self._watch.call.done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has been attended to; ``timeout`` in seconds."""
        self._thread.join(timeout)

    def interrupt(self) -> None:
        """Stop it on all its ranks."""
        self._watch.stop_requested = True

    def _run(self) -> None:
        self._watch.run()
        if self._watch.stuck:
            print(f"What the last kernel had sent was stuck: {self._watch.stuck}")


def orphaned_call(cluster: Cluster) -> OrphanedCall | None:
    """Find out which ranks are at something, and say so; None where all are idle."""
    call = cluster.submit(OnRank("state"), ranks=cluster.living)
    deadline = time.monotonic() + IDLE_SECONDS
    while call.running and (left := deadline - time.monotonic()) > 0:
        for _ in call.events(left):
            pass
    if not call.running:
        return None
    busy = tuple(sorted(call.running))
    print(
        f"Rank {format_ranks(busy)} still runs what the last kernel sent, and its output goes "
        "nowhere: %ddp_interrupt stops it."
    )
    return OrphanedCall(cluster, busy)


class Jobs:
    """Cells and the comparison that run while the notebook goes on."""

    def __init__(self) -> None:
        self._cells: list[RunningCell | OrphanedCall] = []
        self._comparison: RunningComparison | None = None

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that trains, if one does."""
        running = self._comparison
        return None if running is None or running.done else running

    @property
    def running(self) -> list[Running]:
        """All that was started and may not have ended."""
        comparison = self.comparison
        return [*self._cells] if comparison is None else [*self._cells, comparison]

    def add(self, cell: RunningCell | OrphanedCall) -> None:
        """Keep an eye on a cell; those that have ended are forgotten."""
        self._cells = [other for other in self._cells if not other.done] + [cell]

    def begin(self, comparison: RunningComparison) -> None:
        """Train a comparison from now on."""
        self._comparison = comparison
        comparison.begin()

    def notes(self) -> list[str]:
        """Say how far the comparison is, if one trains."""
        if (comparison := self.comparison) is None:
            return []
        return [f"a comparison trains: {comparison.progress() or 'it is being checked'}"]

    def interrupt(self) -> str:
        """Stop the comparison, or where none trains, the cells; say in a sentence what."""
        if (comparison := self.comparison) is not None:
            comparison.interrupt()
            which = f" {comparison.name}" if comparison.name else ""
            return f"Interrupted the comparison{which}; what it has trained is kept."
        busy = [cell for cell in self._cells if not cell.done]
        for cell in busy:
            cell.interrupt()
        if not busy:
            return "Nothing runs in the background."
        where = " and ".join(spoken_ranks(cell.ranks) for cell in busy)
        return f"Interrupted the cell{'s' if len(busy) > 1 else ''} on {where}."

    def stop(self) -> None:
        """Stop the comparison and wait for that; forget the cells, which end with the ranks."""
        if (comparison := self.comparison) is not None:
            comparison.stop()
        self._cells.clear()

    def refuse_if_training(self) -> None:
        """Raise a UserError where a comparison trains."""
        if self.comparison is not None:
            raise UserError(
                "A comparison trains on the ranks: %ddp_interrupt stops it, "
                "%ddp_status tells how far it is."
            )

    def refuse_if_cells_run(self) -> None:
        """Raise a UserError where a cell runs."""
        if busy := [cell for cell in self._cells if not cell.done]:
            raise UserError(
                f"A cell still runs on rank {format_ranks(busy[0].ranks)}: wait for it, "
                "or stop it with %ddp_interrupt."
            )
