"""Passes frames on between a kernel and the agent of another host (kernel's host).

``python -m ddpnb.launcher.keeper PIPE WORDS...`` starts the program of those words, ssh for one.
Its standard input and output lead to the agent; the kernel is at the other end of the pipe.  While
the kernel lives, however busy, the agent hears of it every two seconds.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from ddpnb.protocol.processes import AGENT_GREETING, KernelRequest

PING_SECONDS = 2.0
END_SECONDS = 20.0
"""How long the agent may take to end its ranks once its connection is closed."""
PING = json.dumps({"op": KernelRequest.PING}).encode()


def pass_on(kernel: Connection, agent: Connection) -> None:
    """Pass frames on in both directions until either end is closed."""
    is_greeted, seen = False, b""
    next_ping = 0.0
    with contextlib.suppress(EOFError, OSError):
        while True:
            ready = wait([kernel, agent], PING_SECONDS)
            if is_greeted and time.monotonic() > next_ping:
                agent.send_bytes(PING)
                next_ping = time.monotonic() + PING_SECONDS
            if kernel in ready:
                agent.send_bytes(kernel.recv_bytes())
            if agent in ready and is_greeted:
                kernel.send_bytes(agent.recv_bytes())
            elif agent in ready:  # a login shell may write something before the first frame
                if not (byte := os.read(agent.fileno(), 1)):
                    return
                os.write(kernel.fileno(), byte)
                seen = (seen + byte)[-len(AGENT_GREETING) :]
                is_greeted = seen == AGENT_GREETING


def main(kernel: str, *words: str) -> int:
    """Start the program and keep its connection; return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent, theirs = Pipe()
    program = subprocess.Popen(words, stdin=theirs.fileno(), stdout=theirs.fileno())
    theirs.close()
    try:
        pass_on(Connection(int(kernel)), agent)
        agent.close()
        return abs(program.wait(END_SECONDS))
    finally:
        if program.poll() is None:
            os.killpg(0, signal.SIGKILL)  # it, what it has started, and this process


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
