"""Delays every frame between two network namespaces.

Many Linux kernels lack ``netem``, which would do this. Instead each namespace has a TAP device,
and a process passes frames from one device to the other, later
(``linux/Documentation/networking/tuntap.rst``). It uses about 20 us of a core for each frame.
"""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "late0"
"""The link's name in both namespaces."""
MTU = 9000
TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000


@contextlib.contextmanager
def delayed_link(namespaces: tuple[str, str], subnet: str, seconds: float) -> Iterator[None]:
    """Join two namespaces of ``ip netns`` by ``late0``; needs root.

    Their addresses are ``subnet.1`` and ``subnet.2``.  ``seconds`` is the delay each way.

    Raises:
        OSError: if there is no ``/dev/net/tun``.
        subprocess.CalledProcessError: if ``ip`` fails.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for number, namespace in enumerate(namespaces, start=1):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, end)  # closing removes the device
            made = f"late{os.getpid() % 100_000}-{number}"
            request = struct.pack("16sH", made.encode(), IFF_TAP | IFF_NO_PI)
            fcntl.ioctl(end, TUNSETIFF, request.ljust(40, b"\0"))
            ip("link", "set", made, "netns", namespace, "name", INTERFACE)
            ip("-n", namespace, "addr", "add", f"{subnet}.{number}/24", "dev", INTERFACE)
            ip("-n", namespace, "link", "set", INTERFACE, "mtu", str(MTU), "txqueuelen", "10000")
            ip("-n", namespace, "link", "set", INTERFACE, "up")
            ends.append(end)
        passing = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, *map(str, ends), str(seconds)],
                cwd=Path(__file__).parent,
                stdin=subprocess.PIPE,  # the process ends when stdin closes
                pass_fds=ends,
            )
        )
        stack.callback(passing.kill)
        yield


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


def pass_on(first: int, second: int, seconds: float) -> None:
    """Pass frames from each end to the other, ``seconds`` later, until stdin closes."""
    coming: dict[int, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}
    while True:
        now = time.monotonic()
        for end, frames in coming.items():
            while frames and frames[0][0] <= now:
                with contextlib.suppress(BlockingIOError):  # a full queue drops frames
                    os.write(end, frames.popleft()[1])
        due = [frames[0][0] for frames in coming.values() if frames]
        wait = max(min(due) - time.monotonic(), 0) if due else None
        readable, _, _ = select.select([first, second, sys.stdin], [], [], wait)
        if sys.stdin in readable:
            return
        for end in readable:
            frames = coming[second if end == first else first]
            with contextlib.suppress(BlockingIOError):
                for _ in range(32):
                    frames.append((time.monotonic() + seconds, os.read(end, 2 * MTU)))


if __name__ == "__main__":
    pass_on(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
