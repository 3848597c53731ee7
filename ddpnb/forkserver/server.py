"""The fork server: imports torch once, forks the ranks and ends them.  Runs in the fork server.

The kernel starts ``python -m ddpnb.forkserver.server FD ...`` and exchanges JSON frames with the
fork server over a socket pair.  The fork server forks the controller first, and imports torch while
the controller starts.  The ranks share the modules' memory, so each rank starts in under a second.
On systems where a fork after ``import torch`` may crash, each child is a new interpreter instead.

The fork server runs no tensor operation and never uses CUDA.  With ``OMP_NUM_THREADS=1``, numpy
starts no threads.  So the fork server has one thread, and can fork safely at any time.

When the kernel ends for any reason, its end of the socket closes.  The fork server then ends all
its children and removes the run folder.  If the fork server is killed, the ranks end because of
``PR_SET_PDEATHSIG``, or because their pipes to the fork server close.  The controller's pipe closes
too, and then the controller ends all processes that cells have started.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

import psutil

gc.disable()  # imports create little garbage; ``preload_modules`` freezes the objects before forks

from ddpnb.forkserver.child import Frame, leave_debugger_out, run_child  # noqa: E402
from ddpnb.forkserver.patience import patient_imports  # noqa: E402
from ddpnb.protocol.errors import UserError  # noqa: E402
from ddpnb.protocol.processes import (  # noqa: E402
    MARK,
    ForkServerEvent,
    KernelRequest,
    adopt_orphans,
    hold,
    kill_programs,
    limit_waits,
    may_have_gpus,
    own_package,
    portable,
    process_log,
    remove_folder,
)

HANGUP_SECONDS = 3.0
"""Seconds after SIGHUP until the fork server sends SIGKILL to children that still run."""
WRITE_SECONDS = 0.1
"""Maximum seconds to send a message, so that a suspended rank cannot block the fork server."""
CHUNK_BYTES = 65_536
"""Maximum number of bytes to read from a rank's pipe at once."""
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that a new child must not receive before it has its own handlers."""
COUNT_SECONDS = 30.0
"""Maximum seconds to wait until the GPU driver has reported the number of GPUs."""
COMPILER_SECONDS = 0.3
"""Seconds without a request after which the fork server also imports torch's compiler early."""
LOG_BYTES = 16_384
"""Maximum number of bytes of a log that the kernel receives when a process has ended."""


@dataclass(kw_only=True, slots=True)
class ForkServer:
    """The fork server, which has a pipe to the kernel and child processes."""

    kernel: Connection
    folder: Path
    children: dict[int, int | str] = field(default_factory=dict)
    """Maps the process id of each child to its rank, or to ``"controller"``."""
    pipes: dict[int | str, Connection] = field(default_factory=dict)
    """Maps each rank to the pipe to its control thread."""
    unread: dict[int, bytes] = field(default_factory=dict)
    """Maps each rank to the beginning of an answer whose end has not arrived."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    is_stopped: bool = False
    handlers: dict[KernelRequest, Callable[..., object]] = field(init=False)
    """The function that answers each kind of request.  An agent adds more functions."""
    more_ends: list[Connection | socket.socket | TextIO] = field(default_factory=list)
    """Files and sockets that a forked child closes, in addition to ``pipes``."""

    def __post_init__(self) -> None:
        self.handlers = {
            KernelRequest.PREPARE: preload_modules,
            KernelRequest.START_RANK: self.start_rank,
            KernelRequest.SIGNAL: self.signal,
        }

    def run(self, controller_arguments: list[str], *, preloads: bool = False) -> None:
        """Serve the kernel until it ends.  Without ``controller_arguments``, run no controller."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self.on_sigterm)
        os.environ[MARK] = str(self.folder)  # the fork server of another host has no mark yet
        adopt_orphans()
        try:
            self.more_ends.append(hold(self.folder))
            with patient_imports(self.kernel) if preloads else contextlib.nullcontext():
                if controller_arguments:
                    self.start_controller(controller_arguments)
                if preloads:
                    self.preload()
            self.serve()
        finally:
            self.stop()

    def serve(self) -> None:
        """Serve the kernel and the ranks until the kernel ends."""
        self.selector.register(self.kernel, selectors.EVENT_READ, self.on_kernel)
        self.selector.register(sigchld_wakeup(), selectors.EVENT_READ, self.on_sigchld)
        while not self.is_stopped:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def on_kernel(self, kernel: Connection) -> None:
        """Execute one request from the kernel, and send the answer or the error back."""
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
        except UserError as error:
            answer = {"failure": str(error), "is_users": True}
        except Exception as error:  # noqa: BLE001  ranks must survive; the kernel gets the error
            answer = {"failure": "".join(traceback.format_exception_only(error)).strip()}
        self.report(event=ForkServerEvent.ANSWER, id=request_id, **answer)

    def on_sigterm(self, number: int, _: object) -> None:
        """End this process, and tell the kernel why."""
        self.report(event=ForkServerEvent.EXITED, member="fork server", code=-number)
        sys.exit(0)

    def preload(self) -> None:
        """Import the ranks' modules early.  Import torch's compiler if the kernel stays quiet."""
        with contextlib.suppress(Exception):  # the kernel gets the error when it asks for ranks
            preload_modules(counts_gpus=False)
            if not self.kernel.poll(COMPILER_SECONDS):
                preload_modules(counts_gpus=False, more="torch._dynamo")

    def start_rank(self, *, rank: int, settings: Frame) -> int:
        """Start a rank and return its process id; raise OSError if the system cannot start it."""
        ours, theirs = Pipe()
        limit_waits(ours, write_seconds=WRITE_SECONDS).close()
        pid = self.start("ddpnb.forkserver.child", settings, ours, theirs)
        self.children[pid] = rank
        self.pipes[rank] = ours
        self.unread[rank] = b""
        self.selector.register(ours, selectors.EVENT_READ, partial(self.on_rank, rank))
        return pid

    def start_controller(self, arguments: list[str]) -> None:
        """Start ipyparallel's controller."""
        theirs, ours = Pipe(duplex=False)  # closes when this process ends
        pid = self.start("ddpnb.forkserver.controller", {"arguments": arguments}, ours, theirs)
        self.more_ends.append(ours)
        self.children[pid] = "controller"

    def start(self, module: str, settings: Frame, ours: Connection, theirs: Connection) -> int:
        """Start a child that calls the ``run`` of a module; return the child's process id.

        The child gets the end ``theirs`` of a pipe.  In the portable way, the child is not forked:
        a new interpreter runs the module and reads the settings from the pipe.
        """
        with theirs:
            if portable():
                os.set_inheritable(theirs.fileno(), True)
                words = ["-m", module, str(theirs.fileno()), str(self.folder)]
                pid = os.posix_spawn(
                    sys.executable, [sys.executable, *words], os.environ, setsigdef=ENDING
                )
                ours.send_bytes(json.dumps(settings).encode())
                return pid
            run = importlib.import_module(module).run
            # Until the child has its own handlers, signals must wait.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            if (pid := os.fork()) == 0:
                for end in (self.kernel, ours, *self.more_ends, *self.pipes.values()):
                    end.close()
                run_child(lambda: run(settings, theirs, self.folder))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            return pid

    def forward(self, request_id: int, *, rank: int, command: str, arguments: list[object]) -> None:
        """Forward a command to a rank's control thread.  If the rank is dead, do nothing."""
        if (pipe := self.pipes.get(rank)) is not None:
            message = {"id": request_id, "command": command, "arguments": arguments}
            with contextlib.suppress(OSError):
                pipe.send_bytes(json.dumps(message).encode())

    def signal(self, *, ranks: list[int], number: int) -> None:
        """Send a signal to each of the given ranks that is alive."""
        wanted = {*ranks}
        for pid, member in self.children.items():
            if member in wanted:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def on_rank(self, rank: int, pipe: Connection) -> None:
        """Forward a rank's answers to the kernel.  A suspended rank may send a part of an answer.

        Each answer begins with its length in four bytes, as ``Connection`` sends it.
        """
        if pipe.closed:  # on_sigchld has just reported the rank's exit
            return
        received = b""
        with contextlib.suppress(OSError):
            received = os.read(pipe.fileno(), CHUNK_BYTES)
        if not received:  # the rank has ended
            self.selector.unregister(pipe)
        unread = self.unread[rank] + received
        while len(unread) >= (end := 4 + int.from_bytes(unread[:4])) > 4:
            answer, unread = unread[4:end], unread[end:]
            with contextlib.suppress(ValueError):  # a cell broke the rank's json
                self.report(**json.loads(answer))
        self.unread[rank] = unread

    def on_sigchld(self, wakeup: int) -> None:
        """Reap children, and report each child's exit code and log."""
        os.read(wakeup, 4096)
        for member, code in self.reaped():
            if (pipe := self.pipes.pop(member, None)) is not None:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(pipe)
                pipe.close()
            log = last_bytes_of(process_log(self.folder, member))
            self.report(event=ForkServerEvent.EXITED, member=member, code=code, log=log)

    def reaped(self) -> Iterator[tuple[int | str, int]]:
        """Yield the rank (or ``"controller"``) and the exit code of each child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (member := self.children.pop(pid, None)) is not None:
                yield member, os.waitstatus_to_exitcode(status)

    def report(self, **event: object) -> None:
        """Send an event to the kernel.  Ignore a closed pipe, because ``serve`` detects it."""
        with contextlib.suppress(OSError):
            self.kernel.send_bytes(json.dumps(event).encode())

    def stop(self) -> None:
        """End all children, all processes that they started, and this process.

        SIGHUP asks a rank to end.  SIGTERM kills a rank, unless a cell has set a handler.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another SIGTERM must not interrupt this
        for number, timeout in ((signal.SIGHUP, HANGUP_SECONDS), (signal.SIGKILL, 1.0)):
            for pid in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self.wait_for_children(timeout)
        deadline = time.monotonic() + HANGUP_SECONDS
        while kill_programs(self.folder, psutil.Process().children(recursive=True)):
            list(self.reaped())
            if time.monotonic() > deadline:
                break
        remove_folder(self.folder)
        self.kernel.close()
        os.killpg(0, signal.SIGKILL)

    def wait_for_children(self, timeout: float) -> None:
        """Wait until all children have ended, or until ``timeout`` seconds have passed."""
        deadline = time.monotonic() + timeout
        while self.children and time.monotonic() < deadline:
            if not list(self.reaped()):
                time.sleep(0.01)


def sigchld_wakeup() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.kill(os.getpid(), signal.SIGCHLD)  # a child may have ended before
    return reader


def last_bytes_of(log: Path) -> str:
    """Return the last ``LOG_BYTES`` bytes of a log, or ``""`` if the file does not exist."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def preload_modules(*, counts_gpus: bool = True, package: str = "", more: str = "") -> int:
    """Import the modules that every rank needs, and return the number of this host's GPUs.

    Forked ranks share the memory of these modules.  ``DDPNB_PRELOAD`` and ``more`` name further
    modules, separated by spaces.  Ranks that are not forked import the modules themselves.  Without
    ``counts_gpus``, the number of GPUs is 0.  If ``package``, the notebook's ddpnb, is not the one
    that this process imports, raise UserError.
    """
    if package not in ("", own := own_package()):
        raise UserError(f"The notebook has {package}, but ranks find {own}. Restart the kernel.")
    leave_debugger_out()
    if not portable():
        gc.disable()
        names = f"ddpnb.rank.calls {os.environ.get('DDPNB_PRELOAD', '')} {more}".split()
        for name in (each for each in names if each != "0"):  # 0 turns off the early import
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
    return num_gpus() if counts_gpus else 0


def num_gpus() -> int:
    """Count this host's GPUs in a forked child, because CUDA must not start in this process."""
    if not may_have_gpus():
        return 0
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        run_child(lambda: theirs.send(importlib.import_module("torch").cuda.device_count()))
    theirs.close()
    try:
        if ours.poll(COUNT_SECONDS):
            return int(ours.recv())
    except EOFError:
        pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise RuntimeError("The GPU driver does not answer. Run nvidia-smi, or use --device cpu.")


def main(kernel_fd: str, folder: str, preloads: str, *controller_arguments: str) -> None:
    """Run the fork server for the kernel at the other end of a socket."""
    server = ForkServer(kernel=Connection(int(kernel_fd)), folder=Path(folder))
    server.run(list(controller_arguments), preloads=bool(preloads))


if __name__ == "__main__":
    main(*sys.argv[1:])
