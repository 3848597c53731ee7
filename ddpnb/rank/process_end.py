"""Ends a script as Python ends a process, although the rank goes on.  Runs on the ranks.

Python waits for threads, and then calls the functions of ``atexit`` and the finalizers of objects,
such as temporary directories.  At last it ends child processes.  Cells and kept scripts end when
the rank stops.  Functions that the rank's own libraries have registered are never called.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, final

from ddpnb.compat.process_internals import executor_of, finalizers, module_of

FAILED_SECONDS = 5.0
"""Maximum seconds to wait for the threads of a script that has failed."""
STOP_SECONDS = 1.0
"""Maximum seconds to wait for the threads of cells, or for a child process, when they must end."""


class Registered(NamedTuple):
    """A function of ``atexit``."""

    function: Callable[..., object]
    call: Callable[[], object]
    is_of_script: bool
    """False if an installed module has registered the function during its import."""


class Mark(NamedTuple):
    """All that existed at one time."""

    num_functions: int
    others: frozenset[Any]
    """Threads, finalizers and child processes."""


@final
class ProcessEnd:
    """Knows the threads, functions and child processes that the user's code has started."""

    def __init__(self) -> None:
        self._functions: list[Registered] = []
        self._packages: frozenset[str] = frozenset()
        """The packages that the rank itself uses."""
        self._start = self.mark()

    def start(self) -> None:
        """Note the user's calls of ``atexit.register`` from now on."""
        names = {name.partition(".")[0] for name in sys.modules}
        self._packages = frozenset(names - {"__main__", "ddpnb"})
        self._start, pid = self.mark(), os.getpid()
        register, unregister = atexit.register, atexit.unregister

        def register_users(function: Any, /, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            package = caller.f_globals.get("__name__", "").partition(".")[0]
            if package in self._packages or os.getpid() != pid:
                return register(function, *args, **options)
            code, call = caller.f_code, partial(function, *args, **options)
            is_of_script = code.co_name != "<module>" or "site-packages" not in code.co_filename
            self._functions.append(Registered(function, call, is_of_script))
            return function

        def unregister_users(function: Any) -> None:
            self._functions = [each for each in self._functions if each.function != function]
            unregister(function)

        atexit.register, atexit.unregister = register_users, unregister_users

    def mark(self) -> Mark:
        """Return a mark to end only the code that begins now."""
        return Mark(len(self._functions), frozenset(self._others()))

    def _others(self) -> Iterator[Any]:
        yield from (*threading.enumerate(), *multiprocessing.active_children())
        yield from (*finalizers(of_processes=True), *finalizers(of_processes=False))

    def end(self, mark: Mark | None = None, seconds: float | None = None) -> None:
        """Wait for threads, call the functions of ``atexit``, finalize objects, join processes.

        Args:
            mark: the beginning of the code that ends; if None, all of the user's code ends.
            seconds: the maximum time to wait for threads; if None, there is no limit.
        """
        interrupt = None
        for step in self._steps(mark or self._start, seconds, is_last=mark is None):
            try:
                step()
            except KeyboardInterrupt as error:
                interrupt = error
            except BaseException:  # noqa: BLE001  the user's code; Python goes on, too
                print(f"Exception ignored in {step}:", file=sys.stderr)
                traceback.print_exc()
        if interrupt:
            raise interrupt

    def _steps(
        self, mark: Mark, seconds: float | None, *, is_last: bool
    ) -> Iterator[Callable[[], object]]:
        yield partial(self.join_threads, mark, seconds)
        while found := [
            each for each in self._functions[mark.num_functions :] if is_last or each.is_of_script
        ]:
            self._functions.remove(found[-1])
            yield found[-1].call
        yield from filter(partial(self._is_users, mark), finalizers(of_processes=False))
        yield from (child.join for child in new_children(mark) if not child.daemon)

    def _is_users(self, mark: Mark, finalizer: Any) -> bool:
        package = module_of(finalizer).partition(".")[0]
        is_own = package in self._packages and package not in sys.stdlib_module_names
        return finalizer not in mark.others and not is_own

    def join_threads(self, mark: Mark, seconds: float | None = None) -> None:
        """Wait for the threads that are not daemons.  Executors first finish their work."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if seconds is None else seconds)
        while threads := [
            each for each in threading.enumerate() if not each.daemon and each not in mark.others
        ]:
            for executor in filter(None, map(executor_of, threads)):
                executor.shutdown(wait=False)
            if (left := deadline - time.monotonic()) <= 0:
                return
            threads[0].join(min(left, threading.TIMEOUT_MAX))

    def end_children(self, mark: Mark) -> None:
        """End child processes that are daemons, once the objects that use them are freed."""
        for finalizer in finalizers(of_processes=True):
            if self._is_users(mark, finalizer):
                finalizer()
        # Torch would raise an error for each data worker that a signal ends.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in (children := new_children(mark)):
            child.terminate()
        for child in children:
            child.join(STOP_SECONDS)
        signal.signal(signal.SIGCHLD, handler)


def new_children(mark: Mark) -> list[multiprocessing.process.BaseProcess]:
    """Return the child processes that have started since a mark and are alive."""
    return [each for each in multiprocessing.active_children() if each not in mark.others]
