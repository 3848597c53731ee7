"""What gloo does with a message that is longer than its receiver expects.  (Ranks.)

Gloo's thread throws an exception of C++ that nobody catches, which ends the process, with the
user's variables.  Here C++'s terminate handler has that thread stand still in place of this.  The
group can no longer be used, its waits do not end, and are freed as those of any hang.
"""

import ctypes
import os
import time
from ctypes import c_char_p, c_void_p
from typing import Any

from ddpnb.compat.probe import missing, probe

LIBRARY = "libstdc++.so.6"
GLOOS = b"N4gloo"
"""The first letters of the mangled name of a class of gloo's."""
NAME_AT = ctypes.sizeof(c_void_p)
"""Where in a ``std::type_info`` the pointer to its name lies, in the Itanium C++ ABI."""
MESSAGE = b"gloo: a message came that is longer than this rank expects, or shaped otherwise.\n"

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
