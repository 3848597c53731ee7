"""The fork server: imports torch once, forks the ranks and ends them (fork server).

The kernel starts ``python -m ddpnb.launcher.forkserver FD ...`` and exchanges JSON frames with it
over one socket pair.  The controller is forked first, and torch imported while it starts.  The
ranks share the imported pages; each is ready in a fraction of a second.

The fork server runs no tensor operation, starts no thread and never touches CUDA, so that it can
fork safely at any time, also to replace a dead rank.

When the kernel's end of the socket closes, however the kernel ended, the fork server ends all its
children and removes the run folder.  When the fork server is killed, the operating system ends the
ranks (``PR_SET_PDEATHSIG``), or their own pipes to it close.  The controller's pipe closes too, and
the controller ends whatever cells have started.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

gc.disable()  # imports make few objects that die; they are frozen before the ranks are forked

from ddpnb.launcher.child import (  # noqa: E402
    Frame,
    run_child,
    run_rank,
)
from ddpnb.protocol.processes import (  # noqa: E402
    SERVER_LOCK,
    ForkServerEvent,
    KernelRequest,
    hold,
    limit_waits,
    may_have_gpus,
    rank_log,
)

STOP_TIMEOUT_SECONDS = 3.0
"""How long children may take to end after SIGTERM before they are killed."""
WRITE_SECONDS = 0.1
"""How long a rank may take to read: one that was stopped must not stop this process too."""
READ_SECONDS = 5.0
"""How long a rank may take to write the rest of an answer that has begun to come."""


@dataclass(kw_only=True, slots=True)
class Child:
    """A process of the cluster and, for a rank, the pipe to its control thread."""

    name: str
    pipe: Connection | None = None


@dataclass(kw_only=True, slots=True)
class Forkserver:
    """The pipe to the kernel, and the children."""

    kernel: Connection
    folder: Path
    log_bytes: int = 0
    """How much of a rank's log is sent with its end: to a kernel that cannot read it."""
    children: dict[int, Child] = field(default_factory=dict)
    """By process id."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    is_stopped: bool = False
    handlers: dict[KernelRequest, Callable[..., object]] = field(init=False)
    """What carries out each request and returns its answer; an agent has more of them."""
    more_ends: list[Connection | socket.socket | TextIO] = field(default_factory=list)
    """What a forked child closes besides the pipes to the kernel and to ranks."""

    def __post_init__(self) -> None:
        self.handlers = {
            KernelRequest.PREPARE: preload,
            KernelRequest.START_RANK: self.start_rank,
            KernelRequest.SIGNAL: self.signal,
        }

    def run(self, controller_arguments: list[str]) -> None:
        """Serve the kernel until it has gone; an agent has no arguments for a controller."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            self.more_ends.append(hold(self.folder / SERVER_LOCK))
            if controller_arguments:
                self.start_controller(controller_arguments)
            self.serve()
        finally:
            self.stop()

    def serve(self) -> None:
        """Serve the kernel and the ranks until the kernel has gone."""
        self.selector.register(self.kernel, selectors.EVENT_READ, self.on_kernel)
        with sigchld_wakeup() as wakeup:
            self.selector.register(wakeup, selectors.EVENT_READ, self.on_sigchld)
            while not self.is_stopped:
                for key, _ in self.selector.select():
                    key.data(key.fileobj)

    def on_kernel(self, kernel: Connection) -> None:
        """Carry out one request of the kernel, and answer it or say how it failed."""
        try:
            request: Frame = json.loads(kernel.recv_bytes())
        except (EOFError, OSError):
            self.is_stopped = True
            return
        operation, request_id = request.pop("op"), request.pop("id")
        if operation == KernelRequest.STOP:
            self.is_stopped = True
            return
        try:
            if operation == KernelRequest.FORWARD:
                return self.forward(request_id, **request)
            answer = {"value": self.handlers[operation](**request)}
        except Exception as error:  # noqa: BLE001  the ranks must live on, and the kernel know
            answer = {"failure": "".join(traceback.format_exception_only(error)).strip()}
        self.report(event=ForkServerEvent.ANSWER, id=request_id, **answer)

    def start_rank(self, *, rank: int, environment: dict[str, str], settings: Frame) -> None:
        """Fork a rank.  Raises OSError where the system is out of processes or memory."""
        ours, theirs = Pipe()
        limit_waits(ours, write_seconds=WRITE_SECONDS, read_seconds=READ_SECONDS).close()

        def main() -> None:
            ours.close()
            run_rank(rank, environment, settings, theirs, self.folder)

        pid = self.fork(main)
        theirs.close()
        self.children[pid] = Child(name=str(rank), pipe=ours)
        self.selector.register(ours, selectors.EVENT_READ, self.on_rank)

    def start_controller(self, arguments: list[str]) -> None:
        """Fork ipyparallel's controller."""
        from ddpnb.launcher.controller import run_controller  # noqa: PLC0415  no agent needs it

        theirs, ours = Pipe(duplex=False)  # closes when this process ends, and carries nothing
        self.more_ends.append(ours)
        pid = self.fork(lambda: run_controller(arguments, theirs, self.folder))
        theirs.close()
        self.children[pid] = Child(name="controller")

    def fork(self, main: Callable[[], None]) -> int:
        """Fork a child that runs ``main`` and never returns here; return its pid."""

        def run() -> None:
            pipes = [child.pipe for child in self.children.values() if child.pipe is not None]
            for end in (self.kernel, *self.more_ends, *pipes):
                end.close()
            main()

        pid = os.fork()
        if pid == 0:
            run_child(run)
        return pid

    def forward(self, request_id: int, *, rank: int, command: str, arguments: list[object]) -> None:
        """Pass a command on to a rank's control thread, which answers it unless it is dead."""
        for child in self.children.values():
            if child.name == str(rank) and child.pipe is not None:
                message = {"id": request_id, "command": command, "arguments": arguments}
                with contextlib.suppress(OSError):
                    child.pipe.send_bytes(json.dumps(message).encode())

    def signal(self, *, ranks: list[int], number: int) -> None:
        """Send a signal to those of the ranks that are alive."""
        names = {str(rank) for rank in ranks}
        for pid, child in self.children.items():
            if child.name in names:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def on_rank(self, pipe: Connection) -> None:
        """Pass a rank's answer on to the kernel."""
        if pipe.closed:  # the rank's exit was reported a moment ago
            return
        try:
            answer: Frame = json.loads(pipe.recv_bytes())
        except (EOFError, OSError, ValueError):  # it has ended, or a cell has broken its json
            self.selector.unregister(pipe)
            return
        self.report(**answer)

    def on_sigchld(self, wakeup: int) -> None:
        """Reap children and report how each ended."""
        os.read(wakeup, 4096)
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (child := self.children.pop(pid, None)) is None:
                continue
            if child.pipe is not None:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(child.pipe)
                child.pipe.close()
            code, log = os.waitstatus_to_exitcode(status), self.log_of(child.name)
            self.report(event=ForkServerEvent.EXITED, name=child.name, code=code, log=log)

    def log_of(self, name: str) -> str:
        """Return the end of a rank's log where the kernel cannot read it."""
        if self.log_bytes:
            with contextlib.suppress(OSError):
                path = rank_log(self.folder, name)
                return path.read_text(errors="replace")[-self.log_bytes :]
        return ""

    def report(self, **event: object) -> None:
        """Send the kernel an event; ``serve`` notices a kernel that is gone."""
        with contextlib.suppress(OSError):
            self.kernel.send_bytes(json.dumps(event).encode())

    def stop(self) -> None:
        """End all children, whatever they started, and this process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which another one would cut short
        for number, timeout in ((signal.SIGTERM, STOP_TIMEOUT_SECONDS), (signal.SIGKILL, 1.0)):
            for pid in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self.wait_for_children(timeout)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.kernel.close()
        os.killpg(0, signal.SIGKILL)

    def wait_for_children(self, timeout: float) -> None:
        """Reap children until none is left or the time is up."""
        deadline = time.monotonic() + timeout
        while self.children and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if self.children.pop(pid, None) is not None:
                    continue
            time.sleep(0.01)


@contextlib.contextmanager
def sigchld_wakeup() -> Iterator[int]:
    """Yield a descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)


def preload() -> list[str]:
    """Import what every rank needs, for the ranks to share its memory; return the GPUs' names.

    ``DDPNB_PRELOAD`` names further modules, with spaces between them.
    """
    for name in ("ddpnb.rank.calls", *os.environ.get("DDPNB_PRELOAD", "").split()):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    return describe_gpus()


def describe_gpus() -> list[str]:
    """Return the names of the GPUs, from a throwaway child: CUDA must not start here."""
    code = (
        "import json; from torch import cuda;"
        "print(json.dumps([cuda.get_device_name(i) for i in range(cuda.device_count())]))"
    )
    if not may_have_gpus():
        return []
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return list(json.loads(result.stdout)) if result.returncode == 0 else []


def main(kernel_fd: str, folder: str, *controller_arguments: str) -> None:
    """Be the fork server of the kernel at the other end of a socket."""
    server = Forkserver(kernel=Connection(int(kernel_fd)), folder=Path(folder))
    server.run(list(controller_arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
