"""Uses private parts of Python and torch that are global.  Runs on the ranks."""

import inspect
import sys
import threading
import weakref
from concurrent.futures import Executor
from multiprocessing import util
from typing import Any

import torch
from torch import _tensor_str

from ddpnb.compat.probe import Probe


@Probe("torch", "%ddp_run does not restore torch's options for printing")
def has_print_options() -> bool:
    """Return True if ddpnb can read the options of ``torch.set_printoptions``."""
    return {*vars(_tensor_str.PRINT_OPTS)} <= {
        *inspect.signature(torch.set_printoptions).parameters
    }


def print_options() -> dict[str, Any]:
    """Return the options of ``torch.set_printoptions``."""
    return {**vars(_tensor_str.PRINT_OPTS)} if has_print_options.works else {}


@Probe("Python", "temporary directories and child processes of scripts may remain")
def lists_finalizers() -> bool:
    """Return True if ddpnb can list the finalizers that Python calls when a process ends."""
    found: Any = weakref.finalize, util
    return isinstance(found[0]._registry, dict) and isinstance(found[1]._finalizer_registry, dict)


def finalizers(lowest: int = -sys.maxsize) -> list[Any]:
    """Return the finalizers of objects, then of ``multiprocessing``, in the order of the calls.

    ``lowest`` is the lowest priority of finalizers of ``multiprocessing``.
    """
    found: Any = weakref.finalize, util
    if not lists_finalizers.works:
        return []
    held, of_objects = found[1]._finalizer_registry, reversed([*found[0]._registry])
    keys = sorted((key for key in held if key[0] is not None and key[0] >= lowest), reverse=True)
    return [*(each for each in of_objects if each.atexit), *map(held.get, keys)]


def module_of(finalizer: Any) -> str:
    """Return the name of the module whose function a finalizer calls."""
    function = (
        (finalizer.peek() or (0, 0))[1] if hasattr(finalizer, "peek") else finalizer._callback
    )
    return str(getattr(function, "__module__", None))


def executor_of(thread: threading.Thread) -> Executor | None:
    """Return the executor that has started a thread and waits for more work, if there is one."""
    arguments = getattr(thread, "_args", None) or (getattr(thread, "executor_reference", None),)
    executor = arguments[0]() if isinstance(arguments[0], weakref.ref) else None
    return executor if isinstance(executor, Executor) else None
