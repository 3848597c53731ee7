"""Takes from Python what macOS lacks.  Python imports this file at its start if it is on the path.

``make portable`` puts this folder on the path of every process, to find code that needs Linux.
``DDPNB_TEST_WITHOUT=epoll`` also makes ddpnb treat gloo as on macOS, where waits cannot be ended.
"""

import builtins
import ctypes
import errno
import io
import multiprocessing
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

for module, name in (
    (os, "memfd_create"),
    (os, "posix_fallocate"),
    (os, "sched_getaffinity"),
    (socket, "TCP_INFO"),
):
    if hasattr(module, name):
        delattr(module, name)
if os.environ.get("DDPNB_TEST_WITHOUT") == "epoll":
    del select.epoll


def without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds no file below ``/proc``, except for psutil."""

    def checked(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
            frame = sys._getframe(1)
            while frame is not None and "/psutil/" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is None:
                raise FileNotFoundError(errno.ENOENT, "taken away by tests/portable", path)
        return function(path, *args, **options)

    return checked


builtins.open = io.open = without_proc(io.open)
for name in ("listdir", "scandir", "readlink"):
    setattr(os, name, without_proc(getattr(os, name)))


class Socket(socket.socket):
    def shutdown(self, how: int) -> None:
        if self.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.ENOTCONN, "taken away by tests/portable: shutdown of a listener")
        super().shutdown(how)


socket.socket = Socket


class Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError("taken away by tests/portable: prctl")
        return super().__getattr__(name)


ctypes.CDLL = Library


def fork(function: Callable[[], int] = os.fork) -> int:
    if "torch" in sys.modules:
        raise RuntimeError("taken away by tests/portable: a fork after import torch")
    return function()


os.fork = fork
multiprocessing.set_start_method("spawn")
os.environ["DDPNB_PORTABLE"] = "1"
