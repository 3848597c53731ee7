"""Ends a script as Python ends a process, although the rank goes on.  Runs on the ranks.

Python waits for threads and calls the functions of ``atexit``.  Then it calls the finalizers of
objects, such as temporary directories, and ends child processes.  Cells and kept scripts end when
the rank stops.  ddpnb does not call functions that libraries register when they are imported,
because these libraries stay imported.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any

from ddpnb.compat.process_internals import executor_of, finalizers, module_of

FAILED_SECONDS = 5.0
"""Maximum seconds to wait for the threads of a script that has failed."""
CHILDREN_SECONDS = 1.0
"""Maximum seconds to wait for the threads of cells, or for a child process, when they must end."""


Inventory = frozenset[Any]
"""The user's threads, functions of ``atexit``, finalizers and child processes at one time.

The functions of this module end all that is newer than a mark.
"""
_functions: list[partial[Any]] = []
"""Functions that the user's code has passed to ``atexit.register``."""
_packages: set[str] = set()
"""The packages that the rank itself uses."""


def take_inventory() -> Inventory:
    """Note the user's calls of ``atexit.register`` from now on, and return a mark."""
    names = {name.partition(".")[0] for name in sys.modules}
    _packages.update(names - {"__main__", "ddpnb"})
    pid = os.getpid()
    register, unregister = atexit.register, atexit.unregister

    def register_users(function: Any, /, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        package, code = caller.f_globals.get("__name__", "").partition(".")[0], caller.f_code
        is_import = code.co_name == "<module>" and "site-packages" in code.co_filename
        if is_import or package in _packages or os.getpid() != pid:
            return register(function, *args, **options)
        _functions.append(partial(function, *args, **options))
        return function

    def unregister_users(function: Any) -> None:
        _functions[:] = [each for each in _functions if each.func != function]
        unregister(function)

    atexit.register, atexit.unregister = register_users, unregister_users
    return mark_now()


def mark_now() -> Inventory:
    """Return a mark of all that exists now."""
    children = multiprocessing.active_children()
    return frozenset([*_functions, *threading.enumerate(), *children, *finalizers()])


def join_threads(mark: Inventory, seconds: float | None = None) -> None:
    """Wait for the threads that are not daemons.  Executors first finish their work."""
    deadline = time.monotonic() + (threading.TIMEOUT_MAX if seconds is None else seconds)
    while threads := [t for t in threading.enumerate() if not t.daemon and t not in mark]:
        for executor in filter(None, map(executor_of, threads)):
            executor.shutdown(wait=False)
        if (left := deadline - time.monotonic()) <= 0:
            return
        threads[0].join(min(left, threading.TIMEOUT_MAX))


def end(mark: Inventory, seconds: float | None = None) -> None:
    """Wait for threads, and call the functions of ``atexit``.

    An interrupt ends only the current wait or function, and is raised at the end.
    """
    interrupt, calls = None, [partial(join_threads, mark, seconds)]
    while calls:
        try:
            calls.pop()()
        except KeyboardInterrupt as error:
            interrupt = error
        except BaseException:  # noqa: BLE001  the user's code; Python goes on, too
            traceback.print_exc()
        if found := [each for each in _functions if each not in mark]:
            _functions.remove(found[-1])
            calls = [found[-1]]
    if interrupt:
        raise interrupt


def finalize(mark: Inventory, seconds: float | None = None) -> None:
    """Call finalizers, end daemon processes, and wait for the other child processes.

    Call this method after the objects that use the processes are freed.
    """
    for lowest in (0, -sys.maxsize):  # a queue waits for its readers, or until they end
        for finalizer in finalizers(lowest):
            package = module_of(finalizer).partition(".")[0]
            is_own = package in _packages and package not in sys.stdlib_module_names
            if finalizer not in mark and not is_own:
                finalizer()
        children = [each for each in multiprocessing.active_children() if each not in mark]
        # Torch would raise an error for each data worker that a signal ends.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in children:
            if child.daemon:
                child.terminate()
                child.join(CHILDREN_SECONDS)
        signal.signal(signal.SIGCHLD, handler)
        for child in children:
            child.join(seconds)
