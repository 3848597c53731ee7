"""The fork server and its children, as the kernel starts, reaches and ends them (kernel).

The kernel starts one subprocess, the fork server; all other processes are its children.
It reports their ends over a pipe, which a thread reads here.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ddpnb.protocol.processes import (
    ForkServerEvent,
    KernelRequest,
    RankCommand,
    is_there,
    process_id,
)

STOP_TIMEOUT_SECONDS = 8.0

RECORDED_CALLS = 64
"""How many collectives torch's flight recorder keeps on each rank, to show where it waits."""

CRASH = "Fatal Python error"
"""The first words of a stack that faulthandler writes."""
BEFORE_CRASH = 3
"""How many lines of a log are shown before these."""

Event = dict[str, Any]


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
    """Why it ended if its host was lost or was never started: the end of a sentence."""


class Processes:
    """The fork server and its children."""

    def __init__(
        self,
        *,
        pipe: Connection,
        server: "subprocess.Popen[bytes]",
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._on_exit = on_exit
        self._answers: dict[int, Future[Any]] = {}
        self._command_ids = itertools.count()
        self._send_lock = threading.Lock()
        self._stopped = False
        self.ready: Future[list[str]] = Future()
        """Resolves to the names of the GPUs once ranks can be started."""
        self._stopped_members: set[Member] = set()
        self._pipe = pipe
        self._server = server
        self.process = process_id(server.pid)
        """The fork server, or what leads to an agent."""
        self._reader = threading.Thread(target=self._read, name="ddpnb-processes", daemon=True)

    @classmethod
    def start(
        cls,
        *,
        folder: Path,
        controller_arguments: list[str],
        num_threads: int,
        method: str,
        on_exit: Callable[[Exit], None],
        preload: str = "",
    ) -> "Processes":
        """Start the fork server, which starts the controller.

        Args:
            folder: the cluster's private run folder; the fork server removes it.
            controller_arguments: ipyparallel's command line for the controller.
            num_threads: OpenMP threads of each rank; torch reads it when it is imported.
            method: ``"fork"``, or ``"spawn"`` where forking is not safe.
            on_exit: called from the reading thread when a process has ended.
            preload: modules that the fork server imports, with those that the user names.
        """
        pipe, theirs = Pipe()
        preload = f"{os.environ.get('DDPNB_PRELOAD', '')} {preload}".strip()
        server = subprocess.Popen(
            [sys.executable, "-m", "ddpnb.launcher.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ
            | {
                "OMP_NUM_THREADS": str(num_threads),
                "TORCH_FR_BUFFER_SIZE": str(RECORDED_CALLS),
                "DDPNB_PRELOAD": preload,
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        processes = cls(pipe=pipe, server=server, on_exit=on_exit)
        processes._send(
            folder=str(folder), method=method, controller_arguments=controller_arguments
        )
        processes._reader.start()
        return processes

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._server.pid

    @property
    def stopped_members(self) -> frozenset[Member]:
        """The processes that received SIGSTOP and have not gone on."""
        return frozenset(self._stopped_members)

    def start_rank(
        self, rank: int, environment: Mapping[str, str], settings: Mapping[str, object]
    ) -> None:
        """Start one rank, which joins the process group of ``settings["generation"]``, if any."""
        self._send(
            op=KernelRequest.START_RANK, rank=rank, environment=environment, settings=settings
        )

    def profile_of(self, rank: int, profile: Path) -> Path:
        """Return ipyparallel's folder on a rank's host: where all is on one, that of the kernel."""
        return profile

    def unreachable(self) -> str:
        """Return which hosts do not reach each other, as a part of a sentence; empty if all do."""
        return ""

    def command(self, rank: int, command: RankCommand, *arguments: object) -> "Future[Any]":
        """Have a rank's control thread carry out a command, and return its answer.

        The answer never comes if the rank, or the whole cluster, is gone.  It is a RuntimeError if
        the rank could not carry the command out.
        """
        command_id = next(self._command_ids)
        answer: Future[Any] = Future()
        self._answers[command_id] = answer
        with contextlib.suppress(OSError):
            message = {"command": command, "id": command_id, "arguments": arguments}
            self._send(op=KernelRequest.FORWARD, rank=rank, message=message)
        return answer

    def list_connections(self) -> None:
        """Have the fork server list which ranks are connected, before some of them are freed."""
        with contextlib.suppress(OSError):
            self._send(op=KernelRequest.LIST_CONNECTIONS)

    def signal(self, ranks: list[int], number: int) -> "list[Future[Any]]":
        """Send a signal to those of the ranks that are alive.

        Returns:
            What is done once the signal has been sent; never, if the cluster is gone.
        """
        signal_id = next(self._command_ids)
        answer: Future[Any] = Future()
        self._answers[signal_id] = answer
        with contextlib.suppress(OSError):
            self._send(op=KernelRequest.SIGNAL, ranks=ranks, number=number, signal_id=signal_id)
        return [answer]

    def stop(self) -> None:
        """End every process of the cluster and wait for it; may be called twice."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._send(op=KernelRequest.STOP)
        try:
            self._server.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._server.wait(STOP_TIMEOUT_SECONDS)
        self._pipe.close()

    def _send(self, **message: object) -> None:
        with self._send_lock:
            self._pipe.send_bytes(json.dumps(message).encode())

    def _read(self) -> None:
        while (event := self._receive()) is not None:
            try:
                self._handle(event)
            except Exception:  # noqa: BLE001  the edge of the thread, which must hear the next event
                traceback.print_exc()
        if not self._stopped:
            code = self._exit_code()
            self._kill_group()
            self._on_exit(Exit(member=Service.FORK_SERVER, code=code))
        if not self.ready.done():
            self.ready.set_exception(RuntimeError("the fork server ended before it was ready"))

    def _kill_group(self) -> None:
        """Kill the server if it lives, and what its children had started."""
        if psutil.pid_exists(self.pid) and not is_there(self.process):
            return  # nothing of it is left: the number is another process's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _exit_code(self, timeout: float = 1.0) -> int | None:
        try:
            return self._server.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def _receive(self) -> Event | None:
        """Wait for the next event; return None once either end of the pipe is closed."""
        try:
            event: Event = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError, TypeError):  # TypeError: closed at this end
            return None
        return event

    def _handle(self, event: Event) -> None:
        match event.pop("event"):
            case ForkServerEvent.READY:
                self.ready.set_result(event["gpus"])
            case ForkServerEvent.FAILED:
                self.ready.set_exception(RuntimeError(event["cause"]))
            case ForkServerEvent.ANSWER:
                if (answer := self._answers.pop(event["id"], None)) is not None:
                    if failure := event.get("failure"):
                        answer.set_exception(RuntimeError(failure))
                    else:
                        answer.set_result(event["value"])
            case ForkServerEvent.STOPPED if event["is_stopped"]:
                self._stopped_members.add(member_of(event["name"]))
            case ForkServerEvent.STOPPED:
                self._stopped_members.discard(member_of(event["name"]))
            case ForkServerEvent.EXITED:
                self._stopped_members.discard(member_of(event["name"]))
                if not self._stopped:
                    end = {"code": event["code"], "cause": event.get("cause", "")}
                    self._on_exit(Exit(member=member_of(event["name"]), **end))


def wait_for_file(path: Path, timeout: float, while_waiting: Callable[[], None]) -> None:
    """Wait until a file exists and is complete JSON; a TimeoutError if it does not appear.

    ``while_waiting`` is called repeatedly, and raises to give up.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            json.loads(path.read_text())
            return
        while_waiting()
        time.sleep(0.005)
    raise TimeoutError(f"{path} did not appear within {timeout:.0f} s")


def member_of(name: str) -> Member:
    """Return the process that the fork server reports under ``name``."""
    return int(name) if name.isdigit() else Service(name)


def describe_exit(exit_: Exit) -> str:
    """Say how a process ended: ``"was killed by SIGKILL"``, ``"ended with exit code 1"``."""
    if exit_.code is None:
        return exit_.cause or "has ended"
    if exit_.code >= 0:
        return f"ended with exit code {exit_.code}"
    try:
        return f"was killed by {signal.Signals(-exit_.code).name}"
    except ValueError:
        return f"was killed by signal {-exit_.code}"


def spoken(member: Member) -> str:
    """Return a process as the subject of a sentence: ``"Rank 1"``, ``"The controller"``."""
    return f"Rank {member}" if isinstance(member, int) else f"The {member}"


def log_tail(folder: Path, member: Member, num_lines: int) -> str:
    """Return the last lines of a process's log, or a crash from its first line.

    A few lines before a crash are included: native code often gives its reason there.
    """
    name = f"rank-{member}" if isinstance(member, int) else member.replace(" ", "")
    try:
        lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    crash = next((n for n, line in enumerate(lines) if line.startswith(CRASH)), -num_lines)
    crash = max(0, crash - BEFORE_CRASH) if crash >= 0 else crash
    return "\n".join(lines[crash:][:num_lines])
