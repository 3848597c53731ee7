"""Private parts of ipykernel and IPython.  (Ranks.)

ipykernel reads what is written to a stream's file descriptor, as C code and child processes do, in
a thread.  Here one can wait until that thread has nothing in its hands: what comes after a cell's
end belongs to no cell.
"""

import contextlib
import fcntl
import os
import select
import sys
import termios
import threading
import time
from types import ModuleType
from typing import Any

from ipykernel.iostream import PIPE_BUFFER_SIZE, OutStream
from ipykernel.ipkernel import IPythonKernel
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.compat.probe import Probe

POLL_SECONDS = 0.003
KEPT_BY = "_tee", "_format_exception_for_storage"
"""IPython's methods that keep a cell's output, and its error."""


@Probe("ipykernel", "what C code or a child process prints last in a cell may be lost")
def reads_descriptors() -> bool:
    """Whether the thread that reads a stream's descriptor is as expected."""
    names = {*OutStream._watch_pipe_fd.__code__.co_names}
    started = {*OutStream._setup_stream_redirects.__code__.co_names}
    return "_watch_pipe_fd" in started and names >= {
        *("_fid", "_should_watch", "_original_stdstream_copy", "_exc", "write"),
    }


@Probe("ipykernel", "printing many lines takes longer")
def finds_buffers() -> bool:
    """Whether a stream keeps its text as expected."""
    return {*OutStream.write.__code__.co_names} >= {
        *("parent_header", "_is_master_process", "_buffer_lock", "_buffers", "frozenset"),
        *("_schedule_flush", "echo", "pub_thread"),
    }


@Probe("IPython", "a rank keeps in memory all that it has printed, and is slow to say an error")
def keeps_results() -> bool:
    """Whether IPython keeps a cell's output and error as expected, or keeps neither."""
    callers = InteractiveShell.run_cell, InteractiveShell.run_cell_async
    return all(
        hasattr(InteractiveShell, part) == (part in caller.__code__.co_names)
        for part, caller in zip(KEPT_BY, callers, strict=True)
    )


def keep_no_results(shell: InteractiveShell) -> None:
    """Have a shell not copy to its history what cells print and how they fail.

    Both take memory, and a traceback, which is formatted for it, 0.1 to 0.3 seconds.
    """
    if keeps_results.works:
        copy_output, format_error = KEPT_BY
        vars(shell)[copy_output] = lambda channel: contextlib.nullcontext()
        vars(shell)[format_error] = lambda error: {"ename": type(error).__name__}


@Probe("ipykernel", "the ranks take longer to start, and more memory")
def asks_for_debugger() -> bool:
    """Whether a kernel can do without its debugger."""
    return "_is_debugpy_available" in IPythonKernel.__init__.__code__.co_names


def leave_debugger_out() -> None:
    """Have a kernel of this process not import debugpy, which no client of ranks can reach."""
    if asks_for_debugger.works:
        absent: Any = ModuleType("ipykernel.debugger")
        absent._is_debugpy_available, absent.Debugger = False, object
        sys.modules.setdefault("ipykernel.debugger", absent)


class DescriptorStream(OutStream):
    """A stream that knows whether all that was written to its file descriptor is in it.

    A flush of what is empty costs nothing: both streams are flushed twice a cell, and each flush
    waits for another thread.
    """

    _fid: Any
    has_written = False
    """Whether there may be text that is not sent yet."""
    _latest: tuple[Any, frozenset[Any]] = None, frozenset()
    """The request that was written for last, and the key of its buffer."""

    def write(self, string: str) -> Any:
        """Write to the notebook; return how many characters."""
        parent, (known, key) = self.parent_header, self._latest
        if parent is known and self.pub_thread is not None and os.getpid() == self._master_pid:
            with self._buffer_lock:  # as OutStream, which makes the key of its buffer each time
                self._buffers[key].write(string)
            self._schedule_flush()  # type: ignore[no-untyped-call]
        else:
            super().write(string)
            if finds_buffers.works and self.echo is None:
                self._latest = parent, frozenset(parent.items())
        self.has_written = True
        return len(string)

    def flush(self) -> None:
        """Send what was written, and return once it is sent."""
        if self.has_written:
            self.has_written = False
            super().flush()  # type: ignore[no-untyped-call]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._passing_on = threading.Lock()
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]

    def settle(self, seconds: float) -> None:
        """Wait, but not longer than that, until what was written to the descriptor is here."""
        if not reads_descriptors.works or not self._should_watch:
            return
        deadline = time.monotonic() + seconds
        while any(fcntl.ioctl(self._fid, termios.FIONREAD, bytes(4))):  # it holds text
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        if self._passing_on.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._passing_on.release()

    def _watch_pipe_fd(self) -> None:
        if not reads_descriptors.works:
            return super()._watch_pipe_fd()  # type: ignore[no-untyped-call, no-any-return]
        readable = select.poll()
        readable.register(self._fid, select.POLLIN)
        try:
            while self._should_watch:
                readable.poll()
                with self._passing_on:
                    data = os.read(self._fid, PIPE_BUFFER_SIZE)
                    if not data:
                        return
                    self.write(data.decode(errors="replace"))
                    os.write(self._original_stdstream_copy, data)
        except Exception:  # noqa: BLE001  as ipykernel, which shows it when the stream is closed
            self._exc = sys.exc_info()
