"""Comparisons and cells that run while the notebook runs other cells (kernel).

Each has a thread, whose output appears under the cell that started it.
"""

import time
from collections.abc import Callable, Sequence
from typing import final

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import format_ranks, spoken_ranks
from ddpnb.reports.live import Live
from ddpnb.reports.progress import Progress, progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.cells import SupervisedCall, cell_thread
from ddpnb.session.comparison import Training
from ddpnb.session.errors import CellInterrupt, render_error

STOP_TIMEOUT_SECONDS = 15.0
"""How long a comparison may take to stop; its ranks are killed before that."""


@final
class RunningComparison:
    """A comparison that trains in the background.

    ``prepare`` checks it and returns its training; ``on_end`` is called with this object at the
    end.  Both are called in the thread.
    """

    def __init__(
        self,
        prepare: Callable[[], Training],
        ranks: Sequence[int] = (),
        *,
        on_end: Callable[["RunningComparison"], None] | None = None,
        shown_by: Live | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.error: BaseException | None = None
        """Why it ended early; None otherwise."""
        self.done = False
        """Whether it has ended, for whatever reason."""
        self.stop_requested = False
        self._prepare = prepare
        self._on_end = on_end or _print_error
        self._shown_by = shown_by
        self._training: Training | None = None
        self._result: ComparisonResult | None = None
        self._thread = cell_thread(self._run)
        self._started = time.strftime("%H:%M:%S")

    def begin(self) -> None:
        """Start to train."""
        self._thread.start()

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to, and not by an error."""
        return self.stop_requested and (self.error is None or isinstance(self.error, CellInterrupt))

    def interrupt(self) -> None:
        """End the current run and skip the rest; may be called twice."""
        self.stop_requested = True
        if self._training is not None:
            self._training.stop()

    def stop(self) -> None:
        """Stop it and wait until its ranks are free; may be called twice."""
        self.interrupt()
        self._thread.join(STOP_TIMEOUT_SECONDS)

    def wait(self, timeout: float | None = None) -> ComparisonResult:
        """Wait until it has ended; return the result, or raise its error.

        After ``timeout`` seconds the comparison continues, and a TimeoutError is raised.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the comparison is still training after {timeout} s")
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def result(self) -> ComparisonResult:
        """What it has trained so far.

        Raises:
            UserError: nothing has been trained yet.
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
    def live(self) -> Live | None:
        """What shows it; None before it trains, unless that was known."""
        return self._shown_by if self._training is None else self._training.live

    @property
    def name(self) -> str:
        """The name of the stored comparison; empty before it trains."""
        return "" if self._training is None else self._training.recorder.comparison.name

    def __repr__(self) -> str:
        """Describe the comparison in words that stay true in a saved notebook."""
        if not self.done:
            return f"<comparison, started {self._started}; %ddp_status shows its progress>"
        ending = "stopped" if self.was_stopped else "failed" if self.error else "finished"
        return f"<comparison: {ending}>"

    def _run(self) -> None:
        try:
            self._training = self._prepare()
            if self.stop_requested:
                self._training.stop()
            self._result = self._training.run()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  wait() raises it
            self.error = error
        self.done = True  # first, so that the callback can start another comparison
        self._on_end(self)


def _print_error(running: RunningComparison) -> None:
    """Print why a comparison ended early, under the cell that started it."""
    if running.error is not None and not isinstance(running.error, CellInterrupt):
        print(render_error(running.error))


END_SECONDS = 5.0
"""How long an interrupt waits for cells to end, so that the next line finds the ranks free."""


class Jobs:
    """The cells and the one comparison that run in the background."""

    def __init__(self) -> None:
        self._cells: list[SupervisedCall] = []
        self._comparison: RunningComparison | None = None

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that is training; None if there is none."""
        running = self._comparison
        return None if running is None or running.done else running

    @property
    def busy_ranks(self) -> set[int]:
        """The ranks that run a cell or train."""
        training = () if (comparison := self.comparison) is None else comparison.ranks
        return {*training, *(rank for cell in self._busy_cells() for rank in cell.ranks)}

    def add(self, cell: SupervisedCall) -> None:
        """Add a cell; forget those that have ended."""
        self._cells = [other for other in self._cells if not other.done] + [cell]

    def begin(self, comparison: RunningComparison) -> RunningComparison:
        """Start a comparison, and return it."""
        self._comparison = comparison
        comparison.begin()
        return comparison

    def notes(self) -> list[str]:
        """Return a line on the progress of the comparison, if there is one."""
        if (comparison := self.comparison) is None:
            return []
        return [f"a comparison is training: {comparison.progress() or 'being checked'}"]

    def interrupt(self) -> str:
        """Stop the comparison, or else the cells; return a sentence about what was stopped."""
        if (comparison := self.comparison) is not None:
            comparison.interrupt()
            which = f" {comparison.name}" if comparison.name else ""
            return f"Interrupted the comparison{which}; what it has trained is kept."
        busy = self._busy_cells()
        if not busy:
            return "Nothing runs in the background."
        for cell in busy:
            cell.interrupt()
        deadline = time.monotonic() + END_SECONDS
        while self._busy_cells() and time.monotonic() < deadline:
            time.sleep(0.01)
        where = " and ".join(spoken_ranks(cell.ranks) for cell in busy)
        return f"Interrupted the cell{'s' if len(busy) > 1 else ''} on {where}."

    def stop(self) -> None:
        """Stop the comparison and wait for its end; forget the cells, which end with the ranks."""
        if (comparison := self.comparison) is not None:
            comparison.stop()
        self._cells.clear()

    def refuse_if_training(self) -> None:
        """Raise a UserError while a comparison is training."""
        if self.comparison is not None:
            raise UserError(
                "A comparison is training on the ranks: %ddp_interrupt stops it, "
                "%ddp_status shows its progress."
            )

    def refuse_if_cells_run(self) -> None:
        """Raise a UserError while a cell is running."""
        if busy := self._busy_cells():
            raise UserError(
                f"A cell is still running on rank {format_ranks(busy[0].ranks)}: wait for it, "
                "or stop it with %ddp_interrupt."
            )

    def _busy_cells(self) -> list[SupervisedCall]:
        return [cell for cell in self._cells if not cell.done]
