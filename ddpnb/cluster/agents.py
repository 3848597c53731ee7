"""The agent of one host, as the kernel sees it (kernel)."""

import contextlib
import importlib.metadata
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddpnb.cluster.processes import Event, Exit, Processes
from ddpnb.cluster.starter import AgentStarter
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import AGENT_GREETING, ForkServerEvent, KernelRequest

CHECK_SECONDS = 30.0
"""How long a host may take to start its agent, and the agent to answer."""


class AgentProcesses(Processes):
    """The agent of one host, and that host's ranks."""

    def __init__(
        self,
        name: str,
        *,
        pipe: Connection,
        server: subprocess.Popen[bytes],
        log: Path,
        starter: AgentStarter,
        on_exit: Callable[[Exit], None],
    ) -> None:
        super().__init__(pipe=pipe, server=server, on_exit=on_exit)
        self.name = name
        self.log = log
        self._starter = starter
        self.report: Event = {}
        """What the host has; ``clock`` is by how many seconds it is ahead."""
        self.ended = threading.Event()
        self._reader.start()

    def ask(self, operation: KernelRequest, **fields: object) -> Any:
        """Have the agent carry out a request, and return its answer.

        Raises:
            UserError: the agent did not start, or has ended.
        """
        answer: Future[Any] = Future()
        request_id = next(self._command_ids)
        self._answers[request_id] = answer
        with contextlib.suppress(OSError):
            self._send(op=operation, id=request_id, **fields)
        self.wait(answer, CHECK_SECONDS)
        return answer.result()

    def check(self, **question: object) -> None:
        """Have the agent describe its host; raises as ``ask``."""
        self.report = self.ask(KernelRequest.CHECK, **question)
        self.report["clock"] -= time.time()  # now: other hosts may take longer to answer

    def wait(self, future: "Future[Any]", timeout: float) -> None:
        """Wait until a future is done; raises as ``ask``."""
        deadline = time.monotonic() + timeout
        while not future.done():
            if self.ended.is_set() and not future.done():
                version = importlib.metadata.version("ddpnb")
                code = self._exit_code(CHECK_SECONDS)
                raise UserError(self._starter.explain(self.name, code, self.log, version))
            if time.monotonic() > deadline:
                raise UserError(
                    f"Host {self.name} has not answered within {timeout:g} s: it is too slow, or "
                    "its connection was lost."
                )
            time.sleep(0.005)

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Have the agent import torch; ``ready`` then has the names of the GPUs."""
        with contextlib.suppress(OSError):  # it has ended, as waiting for it says
            self._send(op=KernelRequest.PREPARE, environment=environment)

    def _read(self) -> None:
        try:
            self._skip_to_greeting()
            super()._read()
        finally:
            self.ended.set()

    def _skip_to_greeting(self) -> None:
        seen = b""
        with contextlib.suppress(OSError):
            while not seen.endswith(AGENT_GREETING):
                if not (byte := os.read(self._pipe.fileno(), 1)):
                    return
                seen = (seen + byte)[-len(AGENT_GREETING) :]

    def _handle(self, event: Event) -> None:
        if event["event"] == ForkServerEvent.EXITED:
            self.keep_log(event["name"], event.pop("log", ""))
        super()._handle(event)

    def keep_log(self, name: str, text: str) -> None:
        """Write the log of a rank that has ended where those of this host's ranks are."""
        if text:
            self.log.with_name(f"rank-{name}.log").write_text(text)
