"""Keeps the connection to a host's agent while one kernel leaves and another comes (kernel's host).

``python -m ddpnb.launcher.keeper PIPE WORDS...`` starts the program of those words, ssh for one.
Its standard input and output lead to the agent; the keeper passes the frames on between the agent
and the kernel at the other end of the pipe.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from ddpnb.protocol.processes import AGENT_GREETING, ForkServerEvent, KernelRequest

PING_SECONDS = 2.0
END_SECONDS = 20.0
"""How long the agent may take to end its ranks once its connection is closed."""


class Keeper:
    """Between a kernel, or the wait for one, and an agent."""

    def __init__(self, kernel: Connection, agent: Connection) -> None:
        self.kernel: Connection | None = kernel
        self.agent = agent
        self.listener: socket.socket | None = None
        """Where another kernel connects."""
        self.seconds = 0.0
        """How long the agent outlives a kernel."""
        self.deadline = 0.0
        """Until when to wait for another kernel, in ``time.monotonic()``."""
        self.is_introduced = True
        """Whether the agent has told the kernel which of its ranks have ended."""

    def serve(self) -> None:
        """Pass frames on until the agent ends, or there is no kernel to wait for."""
        self.pass_greeting()
        next_ping = 0.0
        while self.kernel is not None or time.monotonic() < self.deadline:
            ends = [end for end in (self.kernel, self.agent, self.listener) if end is not None]
            ready = wait(ends, PING_SECONDS)
            if time.monotonic() > next_ping:  # a kernel that is busy for long sends none
                self.to_agent(op=KernelRequest.PING)
                next_ping = time.monotonic() + PING_SECONDS
            for end in ready:
                if end is self.listener:
                    self.take_kernel()
                elif end is self.kernel:
                    self.from_kernel(self.kernel)
                elif end is self.agent and not self.from_agent():
                    return

    def pass_greeting(self) -> None:
        """Pass on what comes before the first frame: a login shell may have written something."""
        seen = b""
        while self.kernel is not None and not seen.endswith(AGENT_GREETING):
            if self.agent in wait([self.kernel, self.agent]):
                if not (byte := os.read(self.agent.fileno(), 1)):
                    return
                with contextlib.suppress(OSError):
                    os.write(self.kernel.fileno(), byte)
                seen = (seen + byte)[-len(AGENT_GREETING) :]
            else:
                self.from_kernel(self.kernel)

    def from_kernel(self, kernel: Connection) -> None:
        """Pass a frame on, or take it as meant for this process."""
        try:
            frame = kernel.recv_bytes()
            request = json.loads(frame)
        except (EOFError, OSError):
            request = {"op": KernelRequest.DETACH}
        if request["op"] == KernelRequest.DETACH:
            kernel.close()
            self.kernel, self.deadline = None, time.monotonic() + self.seconds
        elif request["op"] == KernelRequest.ALLOW_DETACH:
            self.seconds = request["seconds"]
            if self.listener is None:
                self.listener = socket.socket(socket.AF_UNIX)
                self.listener.bind(request["address"])  # in a folder that is closed to others
                self.listener.listen()
        else:
            with contextlib.suppress(OSError):
                self.agent.send_bytes(frame)

    def from_agent(self) -> bool:
        """Pass a frame on if there is a kernel; return False at the end of the connection."""
        try:
            frame = self.agent.recv_bytes()
        except (EOFError, OSError):
            return False
        if not self.is_introduced:
            self.is_introduced = json.loads(frame)["event"] == ForkServerEvent.ATTACHED
        if self.kernel is not None and self.is_introduced:
            with contextlib.suppress(OSError):
                self.kernel.send_bytes(frame)
        return True

    def take_kernel(self) -> None:
        """Take another kernel, or refuse it while there is one."""
        assert self.listener is not None
        kernel = Connection(self.listener.accept()[0].detach())
        if self.kernel is not None:
            with contextlib.suppress(OSError):
                kernel.send_bytes(json.dumps({"event": ForkServerEvent.REFUSED}).encode())
            return kernel.close()
        self.kernel, self.is_introduced = kernel, False
        self.to_agent(op=KernelRequest.ATTACH)

    def to_agent(self, **request: object) -> None:
        """Send a request of this process's own."""
        with contextlib.suppress(OSError):
            self.agent.send_bytes(json.dumps(request).encode())


def main(kernel: str, *words: str) -> int:
    """Start the program and keep its connection; return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent, theirs = Pipe()
    program = subprocess.Popen(words, stdin=theirs.fileno(), stdout=theirs.fileno())
    theirs.close()
    try:
        Keeper(Connection(int(kernel)), agent).serve()
        agent.close()
        return abs(program.wait(END_SECONDS))
    finally:
        if program.poll() is None:
            os.killpg(0, signal.SIGKILL)  # it, what it has started, and this process


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
