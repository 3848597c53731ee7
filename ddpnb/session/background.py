"""Supervises a cell or a comparison in a thread, while other cells run.  Runs in the kernel."""

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from ddpnb.cluster.interrupts import Interrupted, noted_interrupts
from ddpnb.cluster.processes import wait_until
from ddpnb.reports.notebook import CELL, Bundle, current_cell, write
from ddpnb.session.errors import CellInterrupt, render_error

JOIN_SECONDS = 0.05
"""Maximum time to wait for the end of the work before ddpnb looks for an interrupt."""


class Background(ABC):
    """A cell or a comparison that shows its output under the notebook cell that started it."""

    def __init__(self, what: str) -> None:
        self.done = False
        """True if the background work has ended, with or without an error."""
        self.error: BaseException | None = None
        """The error that ended the work early; None if there was no error."""
        self.what = what
        self.stop_requested = False
        self._value: Any = None
        """The return value of ``run``."""
        self._thread: threading.Thread | None = None
        self._started = time.strftime("%H:%M:%S")

    @abstractmethod
    def run(self) -> object:
        """Supervise the work until it has ended; raise an error if the work fails."""

    def interrupt(self) -> None:
        """Ask the work to end early; may be called twice and from any thread."""
        self.stop_requested = True

    def begin(self, on_end: Callable[[Self], None] | None = None) -> Self:
        """Call ``run`` in a new thread and return at once.

        When the work ends, the thread calls ``on_end``.  Without ``on_end``, it prints any error.
        """
        run = current_cell(), on_end
        self._thread = threading.Thread(target=self._run_in_thread, args=run, daemon=True)
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds until the work has ended."""
        if (thread := self._thread) is not None:
            with noted_interrupts(), contextlib.suppress(TimeoutError):
                wait_until(
                    lambda: thread.join(JOIN_SECONDS) or not thread.is_alive(),
                    math.inf if timeout is None else timeout,
                    "not ended",
                )

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the work has ended; return a comparison's result, or raise the work's error.

        After ``timeout`` seconds, raise TimeoutError and let the work continue.
        """
        try:
            self.join(timeout)
        except Interrupted:
            text = f"The {self.what} still runs. Run %ddp_interrupt to stop it."
            raise Interrupted(text) from None
        if not self.done:
            raise TimeoutError(f"The {self.what} did not end within {timeout} s and still runs.")
        if self.error is not None:
            raise self.error
        return self._value

    @property
    def was_stopped(self) -> bool:
        """True if the work ended on request, without an error."""
        return self.stop_requested and isinstance(self.error, CellInterrupt | None)

    def __repr__(self) -> str:
        """Return a description that stays true in a saved notebook."""
        if not self.done:
            return f"<{self.what}, started {self._started}; %ddp_status shows its state>"
        ending = "stopped" if self.was_stopped else "failed" if self.error else "finished"
        return f"<{self.what}: {ending}>"

    def _run_in_thread(self, cell: Bundle | None, on_end: Callable[[Self], None] | None) -> None:
        CELL.set(cell)
        try:
            self._value = self.run()
        except BaseException as error:  # noqa: BLE001  wait() raises it
            self.error = error
        self.done = True  # before `on_end`, which may start other work
        if on_end is not None:
            on_end(self)
        elif self.error is not None:
            write("stdout", f"{render_error(self.error)}\n")
