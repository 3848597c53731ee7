"""How does a comparison train while the notebook goes on?  (Notebook side.)

A thread attends to it; what it draws appears where it was started, because the
thread runs in a copy of that cell's context.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from ddpnb.errors import UserError
from ddpnb.notebook.compare import Training
from ddpnb.notebook.errors import CellInterrupt, told
from ddpnb.notebook.show.progress import Progress, progress_of
from ddpnb.notebook.show.result import ComparisonResult

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
