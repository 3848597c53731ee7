"""Writes to the store in a thread, so that a slow disk delays nothing else.  Runs in the kernel."""

import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch


class StoreError(UserError):
    """The store could not read or write runs.  A run that is being trained continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the store that is not written yet."""

    write: Callable[[sqlite3.Connection], object]
    run_id: str = ""
    batch: EventBatch | None = None
    """The steps that the change stores, if any."""
    is_end: bool = False
    """True if the change is the final status of the run."""

    @property
    def num_steps(self) -> int:
        """Number of steps that the change stores."""
        return 0 if self.batch is None else self.batch.num_steps


@final
class Writer:
    """A queue of changes, and a thread that writes the changes in order.

    If a write fails, the changes stay in the queue and are tried again.  The thread ends as soon as
    nothing is queued and no run is in progress.

    Args:
        write: function that writes all changes or none, and raises an error if it fails.
        seconds: number of seconds for which changes are collected before they are written.
    """

    def __init__(self, write: Callable[[Sequence[Change]], None], seconds: float) -> None:
        self.queue: list[Change] = []
        self.running: set[str] = set()
        """The ids of the runs in progress."""
        self._failure: Exception | None = None
        """The error of the last write; None if the last write succeeded."""
        self._write = write
        self._seconds = seconds
        self._state = threading.Condition()
        self._is_due = False
        self._thread: threading.Thread | None = None

    def put(self, change: Change) -> None:
        """Queue a change.  The thread collects steps, and writes other changes at once."""
        with self._state:
            self.queue.append(change)
            self._is_due |= not change.num_steps
            self._state.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddpnb-store", daemon=True)
                self._thread.start()

    def flush(self, seconds: float) -> None:
        """Write all queued changes now; raise a ``StoreError`` if this fails or takes longer."""
        with self._state:
            self._failure, self._is_due = None, True
            self._state.notify_all()
            self._state.wait_for(lambda: not self.queue or self._failure, seconds)
            if self.queue:
                why = self._failure or f"The disk did not answer within {seconds:g} s."
                raise StoreError(str(why)) from self._failure

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_due, self._seconds)
                self._is_due, changes = False, tuple(self.queue)
                if not (changes or self.running):
                    self._thread = None
                    return
            failure = None
            try:
                self._write(changes)
            except Exception as error:  # noqa: BLE001  the thread tries again
                failure = error
            with self._state:
                self._failure = failure
                if failure is None:
                    del self.queue[: len(changes)]
                self._state.notify_all()
