"""The cells and the one comparison that run in the background (kernel).

A thread attends to each while the notebook runs other cells.
"""

import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from ddpnb.protocol.errors import UserError
from ddpnb.reports.live import Live
from ddpnb.reports.progress import Progress, progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.errors import CellInterrupt, render_error
from ddpnb.session.training import Training

STOP_TIMEOUT_SECONDS = 120.0
"""How long a comparison may take to stop, which may have to wait until its ranks have started."""
END_SECONDS = 5.0
"""How long an interrupt waits for cells to end, so that the next line finds the ranks free."""


class Background(ABC):
    """A cell or a comparison; its output appears under the notebook cell that started it."""

    def __init__(self, what: str) -> None:
        self.done = False
        """Whether it has ended in the background, for whatever reason."""
        self.error: BaseException | None = None
        """Why it ended early; None otherwise."""
        self.what = what
        self._thread: threading.Thread | None = None
        self._started = time.strftime("%H:%M:%S")

    @abstractmethod
    def run(self) -> object:
        """Attend to it until it has ended; raise its error."""

    @abstractmethod
    def interrupt(self) -> None:
        """Have it end early; may be called twice, from any thread."""

    def begin(self) -> None:
        """Attend to it in a thread."""
        context = contextvars.copy_context()  # holds the cell that output belongs to
        run = (self._run_in_thread,)
        self._thread = threading.Thread(target=context.run, args=run, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> object:
        """Wait until it has ended; raise its error.

        After ``timeout`` seconds it continues, and a TimeoutError is raised.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the {self.what} still runs after {timeout} s")
        if self.error is not None:
            raise self.error
        return None

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to, and not by an error."""
        return isinstance(self.error, CellInterrupt)

    def __repr__(self) -> str:
        """Describe it in words that stay true in a saved notebook."""
        if not self.done:
            return f"<{self.what}, started {self._started}; %ddp_status shows its state>"
        ending = "stopped" if self.was_stopped else "failed" if self.error else "finished"
        return f"<{self.what}: {ending}>"

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  wait() raises it
            self.error = error
        self.done = True  # first, so that what follows can start another
        self._end()

    def _end(self) -> None:
        """Show why it ended early, under the cell that started it."""
        if self.error is not None:
            print(render_error(self.error))


@final
class RunningComparison(Background):
    """A comparison that trains in the background.

    Args:
        prepare: checks it and returns its training; called in the thread.
        on_end: called with this object at the end, in the thread; by default an error is shown.
        shown_by: what shows it, if that is known before it trains.
    """

    def __init__(
        self,
        prepare: Callable[[], Training],
        *,
        on_end: Callable[["RunningComparison"], None] | None = None,
        shown_by: Live | None = None,
    ) -> None:
        super().__init__("comparison")
        self.stop_requested = False
        self._prepare = prepare
        self._on_end = on_end
        self._shown_by = shown_by
        self._training: Training | None = None
        self._result: ComparisonResult | None = None

    def run(self) -> ComparisonResult:
        """Check it, then train."""
        self._training = self._prepare()
        if self.stop_requested:
            self._training.stop()
        self._result = self._training.run()
        return self._result

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to, and not by an error."""
        return self.stop_requested and (self.error is None or super().was_stopped)

    def interrupt(self) -> None:
        """End the current run and skip the rest; may be called twice."""
        self.stop_requested = True
        if self._training is not None:
            self._training.stop()

    def stop(self) -> None:
        """Stop it and wait until its ranks are free; may be called twice."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_SECONDS)

    def wait(self, timeout: float | None = None) -> ComparisonResult:
        """Wait until it has ended; return the result, or raise its error.

        After ``timeout`` seconds the comparison continues, and a TimeoutError is raised.
        """
        super().wait(timeout)
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

    def _end(self) -> None:
        if self._on_end is not None:
            self._on_end(self)
        elif not super().was_stopped:
            super()._end()


class Jobs:
    """The cells and the one comparison that run in the background."""

    def __init__(self) -> None:
        self._cells: list[Background] = []
        self._comparison: RunningComparison | None = None

    @property
    def comparison(self) -> RunningComparison | None:
        """The comparison that is training; None if there is none."""
        running = self._comparison
        return None if running is None or running.done else running

    def begin_cell(self, cell: Background) -> None:
        """Start a cell; forget those that have ended."""
        self._cells = [other for other in self._cells if not other.done] + [cell]
        cell.begin()

    def begin(self, comparison: RunningComparison) -> RunningComparison:
        """Start a comparison, and return it."""
        self._comparison = comparison
        comparison.begin()
        return comparison

    def interrupt(self) -> str:
        """Stop the comparison, or else the cells; return a sentence about what was stopped."""
        if (comparison := self.comparison) is not None:
            comparison.interrupt()
            which = f" {comparison.name}" if comparison.name else ""
            return f"Interrupted the comparison{which}; what it has trained is kept."
        cells = [cell for cell in self._cells if not cell.done]
        if not cells:
            return "Nothing runs in the background."
        for cell in cells:
            cell.interrupt()
        deadline = time.monotonic() + END_SECONDS
        while not all(cell.done for cell in cells) and time.monotonic() < deadline:
            time.sleep(0.01)
        return f"Interrupted {' and '.join(f'the {cell.what}' for cell in cells)}."

    def stop(self) -> bool:
        """Stop the comparison and wait for its end; return whether there was one.

        Cells are forgotten: they end with the ranks.
        """
        self._cells.clear()
        if (comparison := self.comparison) is None:
            return False
        comparison.stop()
        return True

    def refuse_if_training(self) -> None:
        """Raise a UserError while a comparison is training."""
        if self.comparison is not None:
            raise UserError(
                "A comparison is training on the ranks: %ddp_interrupt stops it, "
                "%ddp_status shows its progress."
            )
