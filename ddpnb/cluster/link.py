"""The link to a fork server: requests go out, answers and ends of processes come back (kernel)."""

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

from ddpnb.protocol.processes import ForkServerEvent, KernelRequest, limit_waits

CRASH = "Fatal Python error"
"""The first words of a stack that faulthandler writes."""
BEFORE_CRASH = 3
"""How many lines of a log are shown before these: native code often gives its reason there."""
LAST_LINES = 15


class Service(StrEnum):
    """A process of the cluster other than a rank."""

    CONTROLLER = "controller"
    FORK_SERVER = "fork server"


Member = int | Service
"""A process of the cluster: a rank by its number, or a service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a process of the cluster ended."""

    member: Member
    code: int | None
    """The exit code; the negative signal number where a signal ended it; None if not known."""
    cause: str = ""
    """Why it ended if its host was lost or it was never started: the end of a sentence."""
    log: str = ""
    """The end of its log."""

    @property
    def last_words(self) -> str:
        """The last lines of its log, or a crash from its first line."""
        lines = self.log.splitlines()
        crash = next((n for n, line in enumerate(lines) if line.startswith(CRASH)), None)
        first = -LAST_LINES if crash is None else max(0, crash - BEFORE_CRASH)
        return "\n".join(lines[first:][:LAST_LINES])

    def __str__(self) -> str:
        """Say how it ended: ``"was killed by SIGKILL"``, ``"ended with exit code 1"``."""
        if self.code is None:
            return self.cause or "has ended"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


class ForkServerLink:
    """One fork server, as the kernel reaches it over a pipe; a thread reads what comes back."""

    def __init__(
        self, pipe: Connection, *, on_exit: Callable[[Exit], None], on_end: Callable[[], None]
    ) -> None:
        """Begin to read.

        Its thread calls ``on_exit`` when a process has ended, and ``on_end`` when the fork server
        has, without being asked to.
        """
        self.is_over = threading.Event()
        """Set once the fork server has ended."""
        self._pipe = pipe
        self._socket = limit_waits(pipe)
        self._on_exit = on_exit
        self._on_end = on_end
        self._is_stopping = False
        self._answers: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="ddpnb-link", daemon=True)
        self._reader.start()

    def request(self, operation: KernelRequest, **fields: object) -> "Future[Any]":
        """Send a request and return its answer.

        The answer is a RuntimeError if the request failed, or the fork server has ended.
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
            except BlockingIOError:  # a part of the frame may be on its way: nothing can follow it
                self.close()
            except OSError:
                pass  # it has ended, as the thread is about to read
        return answer

    def start_rank(self, rank: int, settings: object) -> None:
        """Start a rank; its exit says so if the system does not start it."""

        def note(answer: "Future[Any]") -> None:
            if error := answer.exception():
                self._note(Exit(member=rank, code=None, cause=f"could not be started ({error})"))

        started = self.request(KernelRequest.START_RANK, rank=rank, settings=settings)
        started.add_done_callback(note)

    def begin_stop(self) -> None:
        """Have the fork server end all its processes, and itself; ``is_over`` is set then."""
        self._is_stopping = True
        self.request(KernelRequest.STOP)

    def close(self) -> None:
        """End the connection, which ends the fork server; may be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = self._pipe.recv_bytes()
                try:
                    self._handle(json.loads(frame))
                except Exception:  # noqa: BLE001  the edge of the thread: the next event must come
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
                        answer.set_exception(RuntimeError(failure))
                    else:
                        answer.set_result(event["value"])
            case ForkServerEvent.EXITED:
                self._note(Exit(**event))

    def _note(self, exit_: Exit) -> None:
        if not self._is_stopping:
            self._on_exit(exit_)
