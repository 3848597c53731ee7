"""How does the kernel start, reach and end the cluster's processes?  (Notebook side.)

One subprocess is started, the fork server; all others are its children.  What
happens to them comes back over its pipe and is read by a thread here.
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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ddpnb.notebook.cluster.exits import Exit

STOP_TIMEOUT_SECONDS = 8.0

RECORDED_CALLS = 64
"""Collectives that torch's flight recorder remembers on each rank, to tell where it waits."""

Event = dict[str, Any]


class Processes:
    """The fork server and its children, as the kernel sees them.

    Args:
        folder: the cluster's private run folder; the fork server removes it.
        controller_arguments: ipyparallel's command line for the controller.
        num_threads: OpenMP threads of each rank; read by torch when it is imported.
        method: ``"fork"``, or ``"spawn"`` where forking is not safe.
        on_exit: called from the listening thread when a process has ended.
    """

    def __init__(
        self,
        *,
        folder: Path,
        controller_arguments: list[str],
        num_threads: int,
        method: str,
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._on_exit = on_exit
        self._orders: dict[int, Future[Any]] = {}
        self._order_ids = itertools.count()
        self._send_lock = threading.Lock()
        self._stopped = False
        self.ready: Future[list[str]] = Future()
        """Resolves to the names of the GPUs once ranks can be started."""
        self._pipe, theirs = Pipe()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "ddpnb.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ
            | {"OMP_NUM_THREADS": str(num_threads), "TORCH_FR_BUFFER_SIZE": str(RECORDED_CALLS)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._send(folder=str(folder), method=method, controller_arguments=controller_arguments)
        threading.Thread(target=self._listen, name="ddpnb-processes", daemon=True).start()

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._server.pid

    def start_rank(
        self, rank: int, environment: Mapping[str, str], settings: Mapping[str, object]
    ) -> None:
        """Start one rank; it joins the process group by itself."""
        self._send(op="start_rank", rank=rank, environment=environment, settings=settings)

    def order(self, rank: int, order: str) -> "Future[Any]":
        """Have a rank's control thread do something, whatever its main thread is at."""
        order_id = next(self._order_ids)
        answer: Future[Any] = Future()
        self._orders[order_id] = answer
        self._send(op="tell", rank=rank, message={"order": order, "id": order_id})
        return answer

    def signal(self, ranks: list[int], number: int) -> None:
        """Send a signal to some ranks."""
        self._send(op="signal", ranks=ranks, number=number)

    def stop(self) -> None:
        """End every process of the cluster and wait for it; may be called twice."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._send(op="stop")
        try:
            self._server.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(STOP_TIMEOUT_SECONDS)
        self._pipe.close()

    def _send(self, **message: object) -> None:
        with self._send_lock:
            self._pipe.send_bytes(json.dumps(message).encode())

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError, TypeError):  # TypeError: closed meanwhile
            while True:
                self._handle(json.loads(self._pipe.recv_bytes()))
        if not self._stopped:
            code = self._server.wait(1.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)  # what its children had started
            self._on_exit(Exit(name="fork server", code=code))
        if not self.ready.done():
            self.ready.set_exception(RuntimeError("the fork server ended before it was ready"))

    def _handle(self, event: Event) -> None:
        match event.pop("event"):
            case "ready":
                self.ready.set_result(event["gpus"])
            case "failed":
                self.ready.set_exception(RuntimeError(event["cause"]))
            case "answer":
                self._orders.pop(event["id"]).set_result(event["value"])
            case "exited":
                if not self._stopped:
                    self._on_exit(Exit(name=event["name"], code=event["code"]))


def wait_for_file(path: Path, timeout: float, still_waiting: Callable[[], None]) -> None:
    """Wait until a file exists and is complete JSON.

    Args:
        path: the file.
        timeout: in seconds.
        still_waiting: called between looks; raises to give up.

    Raises:
        TimeoutError: where it did not come.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            json.loads(path.read_text())
            return
        still_waiting()
        time.sleep(0.005)
    raise TimeoutError(f"{path} did not appear within {timeout:.0f} s")
