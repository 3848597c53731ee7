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
from typing import Any, final

from ddpnb.compat.process_internals import executor_of, finalizers, module_of

FAILED_SECONDS = 5.0
"""Maximum seconds to wait for the threads of a script that has failed."""
STOP_SECONDS = 1.0
"""Maximum seconds to wait for the threads of cells, or for a child process, when they must end."""


@final
class ProcessEnd:
    """Finds the threads, functions, finalizers and child processes of the user's code.

    A mark is a set of all that existed at one time.  The other methods end all that is newer.
    """

    def __init__(self) -> None:
        self._functions: list[partial[Any]] = []
        self._packages: frozenset[str] = frozenset()
        """The packages that the rank itself uses."""

    def start(self) -> frozenset[Any]:
        """Note the user's calls of ``atexit.register`` from now on, and return a mark."""
        names = {name.partition(".")[0] for name in sys.modules}
        self._packages, pid = frozenset(names - {"__main__", "ddpnb"}), os.getpid()
        register, unregister = atexit.register, atexit.unregister

        def register_users(function: Any, /, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            package, code = caller.f_globals.get("__name__", "").partition(".")[0], caller.f_code
            is_import = code.co_name == "<module>" and "site-packages" in code.co_filename
            if is_import or package in self._packages or os.getpid() != pid:
                return register(function, *args, **options)
            self._functions.append(partial(function, *args, **options))
            return function

        def unregister_users(function: Any) -> None:
            self._functions = [each for each in self._functions if each.func != function]
            unregister(function)

        atexit.register, atexit.unregister = register_users, unregister_users
        return self.mark()

    def mark(self) -> frozenset[Any]:
        """Return a mark."""
        children = multiprocessing.active_children()
        return frozenset([*self._functions, *threading.enumerate(), *children, *finalizers()])

    def join_threads(self, mark: frozenset[Any], seconds: float | None = None) -> None:
        """Wait for the threads that are not daemons.  Executors first finish their work."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if seconds is None else seconds)
        while threads := [t for t in threading.enumerate() if not t.daemon and t not in mark]:
            for executor in filter(None, map(executor_of, threads)):
                executor.shutdown(wait=False)
            if (left := deadline - time.monotonic()) <= 0:
                return
            threads[0].join(min(left, threading.TIMEOUT_MAX))

    def end(self, mark: frozenset[Any], seconds: float | None = None) -> None:
        """Wait for threads, and call the functions of ``atexit``.

        An interrupt ends only the current wait or function, and is raised at the end.
        """
        interrupt, calls = None, [partial(self.join_threads, mark, seconds)]
        while calls:
            try:
                calls.pop()()
            except KeyboardInterrupt as error:
                interrupt = error
            except BaseException:  # noqa: BLE001  the user's code; Python goes on, too
                traceback.print_exc()
            if found := [each for each in self._functions if each not in mark]:
                self._functions.remove(found[-1])
                calls = [found[-1]]
        if interrupt:
            raise interrupt

    def finalize(self, mark: frozenset[Any], seconds: float | None = None) -> None:
        """Call finalizers, end daemon processes, and wait for the other child processes.

        Call this method after the objects that use the processes are freed.
        """
        for lowest in (0, -sys.maxsize):  # a queue waits for its readers, or until they end
            for finalizer in finalizers(lowest):
                package = module_of(finalizer).partition(".")[0]
                is_own = package in self._packages and package not in sys.stdlib_module_names
                if finalizer not in mark and not is_own:
                    finalizer()
            children = [each for each in multiprocessing.active_children() if each not in mark]
            # Torch would raise an error for each data worker that a signal ends.
            handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for child in children:
                if child.daemon:
                    child.terminate()
                    child.join(STOP_SECONDS)
            signal.signal(signal.SIGCHLD, handler)
            for child in children:
                child.join(seconds)
