"""What gloo does with a message that its receiver does not expect, or no longer.  (Ranks.)

Where a message is longer than expected, gloo's thread throws an exception of C++ that nobody
catches, which ends the process, with the user's variables.  Here C++'s terminate handler has that
thread stand still in place of this.  The group can no longer be used, its waits do not end, and are
freed as those of any hang.

Where nobody waits for a message any more, gloo's thread leaves it unread.  The system then tells it
of the message over and over, for which it takes a whole core; here it is told only once more.
"""

import contextlib
import ctypes
import os
import platform
import re
import select
import time
from collections.abc import Collection, Iterator
from ctypes import c_char_p, c_void_p
from pathlib import Path
from typing import Any

from ddpnb.compat.probe import missing, probe

LIBRARY = "libstdc++.so.6"
GLOOS = b"N4gloo"
"""The first letters of the mangled name of a class of gloo's."""
NAME_AT = ctypes.sizeof(c_void_p)
"""Where in a ``std::type_info`` the pointer to its name lies, in the Itanium C++ ABI."""
MESSAGE = b"gloo: a message came that is longer than this rank expects, or shaped otherwise.\n"

_WATCHED = re.compile(r"tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+)\s+pos:\d+ ino:(\w+)")
"""How Linux lists what an epoll watches; all numbers but the first are hexadecimal."""
_MODIFY = 3
"""``EPOLL_CTL_MOD``."""

_in_use: list[Any] = []
"""The handler that is set, and the one before; ctypes would free them."""
_num_stopped = 0


@probe(
    "torch", "across hosts, calls whose sizes do not match end a rank; `--check` names them first"
)
def replaces_handler() -> bool:
    """Whether C++ has the functions for it, under the names of GCC's library."""
    return bool(_set_handler() and _exception_type())


def survive_long_messages() -> None:
    """Have gloo's threads stand still where they would end the process; may be called twice."""
    if _in_use or not replaces_handler.works:
        return
    handler_type = ctypes.CFUNCTYPE(None)
    before: list[Any] = []

    def handle() -> None:
        global _num_stopped
        if thrown_class().startswith(GLOOS):
            _num_stopped += 1
            os.write(2, MESSAGE)
            while True:
                time.sleep(3600.0)
        before[0]()  # it ends the process

    handler = handler_type(handle)
    before.append(handler_type(_set_handler()(ctypes.cast(handler, c_void_p))))
    _in_use.extend((handler, before))


class _Event(ctypes.Structure):
    """``struct epoll_event``, which Linux packs on x86 alone."""

    _pack_ = 1 if platform.machine() in ("x86_64", "i686") else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def leave_unread(inodes: Collection[int]) -> int:
    """Have gloo's threads told once more of these sockets' messages, and then only of new ones.

    Returns:
        How many of the sockets gloo watches.
    """
    libc, num = ctypes.CDLL(None), 0
    for epoll, listed in _watched():
        for fd, events, data, inode in _WATCHED.findall(listed):
            if int(inode, 16) in inodes and _is_socket(fd):
                event = _Event(int(events, 16) | select.EPOLLET, int(data, 16))
                num += libc.epoll_ctl(epoll, _MODIFY, int(fd), ctypes.byref(event)) == 0
    return num


def _is_socket(fd: str) -> bool:
    """Return whether a descriptor is a socket: gloo's threads watch a pipe too."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return False


def watched_beside(inodes: Collection[int]) -> set[int]:
    """Return the inodes of all that gloo's threads watch which watch one of these."""
    found: set[int] = set()
    for _, listed in _watched():
        beside = {int(inode, 16) for *_, inode in _WATCHED.findall(listed)}
        if not beside.isdisjoint(inodes):
            found |= beside
    return found


def _watched() -> Iterator[tuple[int, str]]:
    """Yield each epoll of this process, with the list of what it watches; none but on Linux."""
    folder = Path("/proc/self/fd")
    for fd in os.listdir(folder) if folder.exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(folder / fd) == "anon_inode:[eventpoll]":
                yield int(fd), Path(f"/proc/self/fdinfo/{fd}").read_text()


def num_stopped_threads() -> int:
    """Return how many of gloo's threads stand still."""
    return _num_stopped


def thrown_class() -> bytes:
    """Return the mangled name of the class of the exception that this thread throws; or nothing."""
    if not (info := _exception_type()()):
        return b""
    return c_char_p.from_address(info + NAME_AT).value or b""


def _set_handler() -> Any:
    """Return ``std::set_terminate``."""
    function = ctypes.CDLL(LIBRARY)._ZSt13set_terminatePFvvE
    function.restype, function.argtypes = c_void_p, [c_void_p]
    return function


def _exception_type() -> Any:
    """Return ``abi::__cxa_current_exception_type``."""
    function = getattr(ctypes.CDLL(LIBRARY), "__cxa_current_exception_type")
    function.restype, function.argtypes = c_void_p, []
    return function


def missing_features() -> tuple[str, ...]:
    """Return a sentence if a feature is off with this version of C++'s library."""
    return missing((replaces_handler,))
