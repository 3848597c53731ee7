"""What runs in the background: a thread attends to it while other cells run (kernel)."""

import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, final

from ddpnb.protocol.errors import UserError
from ddpnb.reports.live import Live
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.errors import CellInterrupt, render_error
from ddpnb.session.training import Training


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

    def begin(self) -> Self:
        """Attend to it in a thread; return it."""
        context = contextvars.copy_context()  # holds the cell that output belongs to
        run = (self._run_in_thread,)
        self._thread = threading.Thread(target=context.run, args=run, daemon=True)
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self, timeout: float | None = None) -> object:
        """Wait until it has ended; raise its error.

        After ``timeout`` seconds it continues, and a TimeoutError is raised.
        """
        self.join(timeout)
        if not self.done:
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

    Its thread calls ``prepare``, which checks it and returns its training, and at the end
    ``on_end``; by default an error is shown.
    """

    def __init__(
        self,
        prepare: Callable[[], Training],
        live: Live,
        on_end: Callable[["RunningComparison"], None] | None = None,
    ) -> None:
        super().__init__("comparison")
        self.live = live
        self.stop_requested = False
        self.training: Training | None = None
        """None before it has been checked."""
        self._prepare = prepare
        self._on_end = on_end

    def run(self) -> None:
        """Check it, then train."""
        self.training = self._prepare()
        self.training.run(lambda: self.stop_requested)

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to, and not by an error."""
        return self.stop_requested and (self.error is None or super().was_stopped)

    def interrupt(self) -> None:
        """End the current run and skip the rest; may be called twice."""
        self.stop_requested = True

    def wait(self, timeout: float | None = None) -> ComparisonResult:
        """Wait until it has ended; return the result, or raise its error.

        After ``timeout`` seconds the comparison continues, and a TimeoutError is raised.
        """
        super().wait(timeout)
        return self.result

    @property
    def result(self) -> ComparisonResult:
        """What it has trained so far; a UserError where that is nothing."""
        if self.training is None:
            raise UserError("The comparison has trained nothing yet.")
        return self.training.result

    def _end(self) -> None:
        if self._on_end is not None:
            self._on_end(self)
        elif not super().was_stopped:
            super()._end()
