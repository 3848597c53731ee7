"""What runs in the background: a thread attends to it while other cells run (kernel)."""

import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from ddpnb.session.errors import CellInterrupt, render_error


class Background(ABC):
    """A cell or a comparison; its output appears under the notebook cell that started it."""

    def __init__(self, what: str) -> None:
        self.done = False
        """Whether it has ended in the background, for whatever reason."""
        self.error: BaseException | None = None
        """Why it ended early; None otherwise."""
        self.what = what
        self.stop_requested = False
        self._value: Any = None
        """What ``run`` has returned."""
        self._thread: threading.Thread | None = None
        self._started = time.strftime("%H:%M:%S")

    @abstractmethod
    def run(self) -> object:
        """Attend to it until it has ended; raise its error."""

    def interrupt(self) -> None:
        """Have it end early; may be called twice, from any thread."""
        self.stop_requested = True

    def begin(self, on_end: Callable[[Self], None] | None = None) -> Self:
        """Attend to it in a thread; return it.

        ``on_end`` is called there at the end; by default an error is shown under the cell.
        """
        context = contextvars.copy_context()  # holds the cell that output belongs to
        run = self._run_in_thread, on_end
        self._thread = threading.Thread(target=context.run, args=run, daemon=True)
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it has ended; return a comparison's result, or raise the error.

        After ``timeout`` seconds it continues, and a TimeoutError is raised.
        """
        self.join(timeout)
        if not self.done:
            raise TimeoutError(f"the {self.what} still runs after {timeout} s")
        if self.error is not None:
            raise self.error
        return self._value

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to, and not by an error."""
        return self.stop_requested and isinstance(self.error, CellInterrupt | None)

    def __repr__(self) -> str:
        """Describe it in words that stay true in a saved notebook."""
        if not self.done:
            return f"<{self.what}, started {self._started}; %ddp_status shows its state>"
        ending = "stopped" if self.was_stopped else "failed" if self.error else "finished"
        return f"<{self.what}: {ending}>"

    def _run_in_thread(self, on_end: Callable[[Self], None] | None) -> None:
        try:
            self._value = self.run()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  wait() raises it
            self.error = error
        self.done = True  # first, so that what follows can start another
        if on_end is not None:
            on_end(self)
        elif self.error is not None:
            print(render_error(self.error))
