"""Starts, signals and ends the processes of a cluster.  Runs in the kernel.

The kernel starts only the fork server.  The fork server starts all other processes.
"""

import abc
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ddpnb.cluster.call import START_TIMEOUT_SECONDS
from ddpnb.cluster.interrupts import noted_interrupts, raise_if_interrupted
from ddpnb.cluster.link import Exit, ForkServerLink, Service
from ddpnb.cluster.placement import (
    ClusterSpec,
    Host,
    Placement,
    controller_arguments,
    place_ranks,
)
from ddpnb.protocol.cores import num_cores
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import (
    MARK,
    KernelRequest,
    RankCommand,
    kill_programs,
    may_have_gpus,
    own_package,
    portable,
    private_folder,
    remove_folder,
    working_folder,
)

STOP_TIMEOUT_SECONDS = 8.0
RECORDED_CALLS = 64
"""The number of collectives that torch's flight recorder keeps, to show where a rank waits."""

OnExit = Callable[[Exit], None]
"""Function that another thread calls when a process has ended unexpectedly."""


def torch_environment() -> dict[str, str]:
    """Return the environment variables that must be set before torch is imported."""
    return {
        "OMP_NUM_THREADS": "1",  # each rank sets its own number
        "TORCH_FR_BUFFER_SIZE": str(RECORDED_CALLS),
        "DDPNB_PRELOAD": os.environ.get("DDPNB_PRELOAD", ""),
    }


class ForkServerProcess:
    """The kernel's child process that starts the controller and the ranks of this host."""

    def __init__(
        self,
        folder: Path,
        on_exit: OnExit,
        environment: Mapping[str, str],
        address: str = "",
        ports: Sequence[int] = (),
        preloads: bool = False,
    ) -> None:
        """Start the fork server.  The fork server removes the run folder ``folder`` when it ends.

        Engines on other hosts reach the controller at the ``address`` and ``ports`` of this host.
        If ``preloads``, the fork server imports torch at once, while no program needs the cores.
        """
        pipe, theirs = Pipe()
        arguments = controller_arguments(folder / "profile", address, ports)
        words = [str(theirs.fileno()), str(folder), "preloads" * preloads, *arguments]
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-m", "ddpnb.forkserver.server", *words],
            pass_fds=[theirs.fileno()],
            # IPython warns if the home is read-only.  This also marks the programs of cells.
            env={**os.environ, **environment, MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._server.pid
        self.link = ForkServerLink(pipe, on_exit=on_exit, on_end=self._note_end)

    def stop(self, timeout: float = STOP_TIMEOUT_SECONDS) -> None:
        """End all processes, and kill them after ``timeout`` seconds; may be called twice."""
        self.link.begin_stop()
        try:
            self._server.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._server.wait(STOP_TIMEOUT_SECONDS)
        if self.folder.exists():  # the fork server was killed, so programs may be left
            kill_programs(self.folder)
            remove_folder(self.folder)
        self.link.close()

    def _note_end(self) -> None:
        self._kill_group()
        self.link.on_exit(Exit(member=Service.FORK_SERVER, code=self._server.wait()))
        remove_folder(self.folder)

    def _kill_group(self) -> None:
        """Kill the fork server and its children.  The pid stays valid until ``wait`` is called."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        kill_programs(self.folder)


class Preload:
    """The fork server that imports torch before the user starts ranks, if there is one."""

    server: ForkServerProcess | None = None

    @noted_interrupts()
    def start(self) -> None:
        """Start the fork server, unless it is running, impossible or turned off."""
        if self.server or portable() or "0" in os.environ.get("DDPNB_PRELOAD", "").split():
            return
        self.exits: list[Exit] = []
        with contextlib.suppress(OSError, RuntimeError, UserError):  # the start reports the error
            self._inherited = inherited()
            self.server = ForkServerProcess(
                private_folder(), self.exits.append, torch_environment(), preloads=True
            )

    def take(self, on_exit: OnExit) -> ForkServerProcess | None:
        """Return the fork server for a cluster.  If it is outdated or damaged, stop it."""
        server = self.server
        if server is not None and not self.exits and self._inherited == inherited():
            self.server, server.link.on_exit = None, on_exit
            return server
        self.stop()
        return None

    def stop(self) -> None:
        """Kill the fork server, which has no ranks; may be called twice."""
        if self.server is not None:
            self.server.stop(timeout=0)
            self.server = None


preload = Preload()
"""The early import of this kernel."""


def inherited() -> object:
    """Return the kernel's properties that new processes inherit."""
    return dict(os.environ), working_folder(), os.sched_getaffinity(0)


class Processes(abc.ABC):
    """The controller and the ranks of a cluster, on one or several hosts."""

    server: ForkServerProcess
    """The kernel's child process, which starts this host's processes."""
    prepared: Future[int]
    """A future that is done once ranks can start; its result is the number of this host's GPUs."""
    placement: Placement

    @property
    def links(self) -> Sequence[ForkServerLink]:
        """The links to the fork servers, in the order of the hosts in the placement."""
        return (self.server.link,)

    @abc.abstractmethod
    def place(self, progress: Callable[[str], None]) -> Placement:
        """Wait until the hosts have reported their resources, then choose each rank's host.

        ``progress`` is called with a short description of each phase.  Raises UserError if the
        hosts cannot run the cluster.
        """

    def prepare(self, rank: int) -> None:  # noqa: B027  optional for subclasses
        """Prepare a rank's host, which may have been lost, to start the rank."""

    def stop(self) -> None:
        """End every process of the cluster, and wait until all have ended; may be called twice."""
        self.server.stop()

    def command(self, rank: int, command: RankCommand, *arguments: object) -> "Future[Any]":
        """Send a command to a rank's control thread, and return a future with the answer.

        If the rank is dead, the future never completes.  The future raises RuntimeError if the rank
        could not carry out the command, or if the whole cluster has ended.
        """
        fields = {"rank": rank, "command": command, "arguments": arguments}
        return self.link_of(rank).request(KernelRequest.FORWARD, **fields)

    def signal(self, ranks: Collection[int], number: int) -> "list[Future[Any]]":
        """Signal the living ``ranks``; return futures that are done once the signal is sent."""
        fields = {"ranks": [*ranks], "number": number}
        return [link.request(KernelRequest.SIGNAL, **fields) for link in self.links]

    def link_of(self, rank: int) -> ForkServerLink:
        """Return the link to the fork server that starts a rank."""
        return self.links[self.placement.host_of[rank]]


StartProcesses = Callable[[ClusterSpec, Path, OnExit], Processes]
"""Function that starts a cluster's processes without waiting until the hosts are ready."""


class LocalProcesses(Processes):
    """The fork server of this host and its children."""

    def __init__(self, spec: ClusterSpec, folder: Path, on_exit: OnExit) -> None:
        """Start the fork server; raise UserError if this host cannot run the cluster."""
        if sys.platform == "win32":
            raise UserError("ddpnb does not run on Windows itself. Use WSL 2 on Windows.")
        self._spec = spec
        may_use_gpus = spec.device == "cuda" or (not spec.is_on_cpu and may_have_gpus())
        planned = None if may_use_gpus else self._place(num_gpus=0)
        self._planned = planned
        # The first DDP or optimizer imports torch's compiler, which takes 1 s of a core and 66 MB.
        # If there are more ranks than cores, the fork server does this once for all ranks.
        num_on_cpu = planned.devices.count("cpu") if planned else 0
        more = "torch._dynamo" if num_on_cpu > num_cores() else ""
        taken = preload.take(on_exit)
        self.server = taken or ForkServerProcess(folder, on_exit, torch_environment())
        self.prepared = self.server.link.request(
            KernelRequest.PREPARE, counts_gpus=may_use_gpus, package=own_package(), more=more
        )

    def place(self, progress: Callable[[str], None]) -> Placement:
        """Choose each rank's device.  If ranks may use GPUs, first wait for the number of GPUs."""
        progress("importing torch")
        self.placement = self._planned or self._place(
            result_of(self.prepared, START_TIMEOUT_SECONDS)
        )
        return self.placement

    def _place(self, num_gpus: int) -> Placement:
        return place_ranks(self._spec, [Host(num_cores=num_cores(), num_gpus=num_gpus)])


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until ``is_so()`` is true; raise TimeoutError with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not is_so():
        raise_if_interrupted()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {seconds:.0f} s")
        time.sleep(0.003)


def result_of(answer: "Future[Any]", seconds: float) -> Any:
    """Wait for an answer; raise TimeoutError after ``seconds``, or the answer's own error."""
    wait_until(answer.done, seconds, "no answer")
    return answer.result()


def wait_for_file(path: Path, while_waiting: Callable[[], None]) -> None:
    """Wait until a file contains complete JSON; raise TimeoutError if this takes too long.

    ``while_waiting`` is called repeatedly, and can raise an error to end the wait.
    """

    def is_complete() -> bool:
        while_waiting()
        with contextlib.suppress(FileNotFoundError, ValueError):
            json.loads(path.read_text())
            return True
        return False

    wait_until(is_complete, START_TIMEOUT_SECONDS, f"{path} did not appear")
