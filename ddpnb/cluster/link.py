"""The connection to a fork server: sends requests, receives answers.  Runs in the kernel."""

import contextlib
import itertools
import json
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import ForkServerEvent, KernelRequest, limit_waits

CRASH = "Fatal Python error"
"""The first words of the crash report that Python's ``faulthandler`` writes."""
BEFORE_CRASH = 3
"""Number of log lines to show before a crash report.  These lines often give the reason."""
LAST_LINES = 15


class Service(StrEnum):
    """A process of the cluster other than a rank."""

    CONTROLLER = "controller"
    FORK_SERVER = "fork server"


Member = int | Service
"""A process of the cluster: the number of a rank, or a service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """The way in which a process of the cluster ended."""

    member: Member
    code: int | None
    """The exit code.  Minus the signal's number if a signal ended the process.  None if unknown."""
    cause: str = ""
    """A text such as ``"could not be started"`` if the start failed or the host was lost."""
    log: str = ""
    """The end of the process's log."""

    @property
    def last_words(self) -> str:
        """The first lines of the log's crash report.  Without a report, the log's last lines."""
        lines = self.log.splitlines()
        crash = next((n for n, line in enumerate(lines) if line.startswith(CRASH)), None)
        first = -LAST_LINES if crash is None else max(0, crash - BEFORE_CRASH)
        return "\n".join(lines[first:][:LAST_LINES])

    def __str__(self) -> str:
        """Say how the process ended, for example ``"was killed by SIGKILL"``."""
        if self.code is None:
            return self.cause or "has ended"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


class ForkServerLink:
    """The kernel's connection to one fork server, over a pipe.  A thread reads the answers."""

    def __init__(
        self, pipe: Connection, *, on_exit: Callable[[Exit], None], on_end: Callable[[], None]
    ) -> None:
        """Start the thread that reads answers.

        The thread calls ``on_exit`` when a process has ended, and ``on_end`` when the fork server
        has ended unexpectedly.
        """
        self.is_over = threading.Event()
        """Set once the fork server has ended."""
        self._pipe = pipe
        self._socket = limit_waits(pipe)
        self.on_exit = on_exit
        self._on_end = on_end
        self._is_stopping = False
        self._answers: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="ddpnb-link", daemon=True)
        self._reader.start()

    def request(self, operation: KernelRequest, **fields: object) -> "Future[Any]":
        """Send a request, and return a future with the answer.

        The future raises RuntimeError if the request failed or the fork server has ended.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if self.is_over.is_set():
                answer.set_exception(RuntimeError("the fork server has ended"))
                return answer
            request_id = next(self._ids)
            self._answers[request_id] = answer
            frame = {"op": operation, "id": request_id, **fields}
            try:
                self._pipe.send_bytes(json.dumps(frame).encode())
            except BlockingIOError:  # half a frame may have been sent, so the pipe is unusable
                self.close()
            except OSError:
                pass  # the fork server has ended; the thread will read that
        return answer

    def start_rank(self, rank: int, settings: object) -> "Future[Any]":
        """Start a rank, and return a future with its process id.

        If the system cannot start the process, call ``on_exit``.
        """

        def note(answer: "Future[Any]") -> None:
            if error := answer.exception():
                self._note(Exit(member=rank, code=None, cause=f"could not be started ({error})"))

        started = self.request(KernelRequest.START_RANK, rank=rank, settings=settings)
        started.add_done_callback(note)
        return started

    def begin_stop(self) -> None:
        """Ask the fork server to end its processes and itself.  ``is_over`` is set at the end."""
        self._is_stopping = True
        self.request(KernelRequest.STOP)

    def close(self) -> None:
        """Close the connection to end the fork server; may be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = self._pipe.recv_bytes()
                try:
                    self._handle(json.loads(frame))
                except Exception:  # noqa: BLE001  the thread must go on reading events
                    traceback.print_exc()
        with self._lock:
            self.is_over.set()
            unanswered, self._answers = self._answers, {}
        self._pipe.close()
        self._socket.close()
        if not self._is_stopping:
            self._on_end()
        for answer in unanswered.values():
            answer.set_exception(RuntimeError("the fork server has ended"))

    def _handle(self, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case ForkServerEvent.ANSWER:
                if (answer := self._answers.pop(event["id"], None)) is not None:
                    if failure := event.get("failure"):
                        kind = UserError if event.get("is_users") else RuntimeError
                        answer.set_exception(kind(failure))
                    else:
                        answer.set_result(event["value"])
            case ForkServerEvent.EXITED:
                self._note(Exit(**event))

    def _note(self, exit_: Exit) -> None:
        if not self._is_stopping:
            self.on_exit(exit_)
