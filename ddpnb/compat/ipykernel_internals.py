"""Uses private parts of ipykernel and IPython.  Runs on the ranks.

C code and child processes write text to a stream's file descriptor.  A thread of ipykernel reads
and forwards this text.  This module can wait until this thread has forwarded all text.  Text that
the thread forwards after the end of a cell would not appear in the cell.
"""

import contextlib
import fcntl
import inspect
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Mapping
from typing import Any

from ipykernel.iostream import OutStream
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.ultratb import VerboseTB

from ddpnb.compat.probe import Probe

POLL_SECONDS = 0.003
READ_BYTES = 1000
"""Maximum number of bytes to read from a descriptor at once, as in ipykernel."""
KEPT_BY = "_tee", "_format_exception_for_storage"
"""IPython's methods that store the output and the error of a cell in the history."""


@Probe("ipykernel", "the last output of C code or a child process in a cell may be lost")
def reads_descriptors() -> bool:
    """Return True if the thread that reads a stream's descriptor uses the expected names."""
    names = {*OutStream._watch_pipe_fd.__code__.co_names}
    started = {*OutStream._setup_stream_redirects.__code__.co_names}
    return "_watch_pipe_fd" in started and names >= {
        *("_fid", "_should_watch", "_original_stdstream_copy", "_exc", "write"),
    }


@Probe("IPython", "ranks keep all their output in memory, and errors take longer to appear")
def keeps_results() -> bool:
    """Return True if ddpnb can prevent IPython from storing a cell's output and error."""
    callers = InteractiveShell.run_cell, InteractiveShell.run_cell_async
    return all(
        hasattr(InteractiveShell, part) == (part in caller.__code__.co_names)
        for part, caller in zip(KEPT_BY, callers, strict=True)
    )


def keep_no_results(shell: InteractiveShell) -> None:
    """Prevent a shell from copying the output and the errors of cells to its history.

    The copies take memory.  Formatting a traceback for the history takes 0.1 to 0.3 seconds.
    """
    if keeps_results.works:
        copy_output, format_error = KEPT_BY
        vars(shell)[copy_output] = lambda channel: contextlib.nullcontext()
        vars(shell)[format_error] = lambda error: {"ename": type(error).__name__}


@Probe("IPython", "tracebacks from ranks show a temporary file name instead of the cell")
def formats_frames() -> bool:
    """Return True if tracebacks name the cell, or if ddpnb can make them name the cell."""
    return hasattr(CachingCompiler, "format_code_name") or (
        [*inspect.signature(VerboseTB.format_record).parameters]
        == ["self", "frame", "file", "lnum", "func", "lines", "index"]
    )


def name_cells(shell: InteractiveShell, numbers: Mapping[str, int]) -> None:
    """Make IPython 7's tracebacks name cells, such as ``Cell In[3], line 2``, as IPython 8 does.

    ``numbers`` maps the file name of a cell's code to the number of the cell.
    """
    if hasattr(shell.compile, "format_code_name") or not formats_frames.works:
        return
    usual: Any = shell.InteractiveTB.format_record

    def format_record(frame: Any, file: str, line: int, function: str, *source: Any) -> Any:
        if (path := frame.f_code.co_filename) in numbers:
            is_function = not function.startswith("<cell line")
            file = f"Cell In[{numbers[path]}], line {line}" + "," * is_function
            function = function if is_function else "?"  # IPython leaves "?" out
        header, end, lines = usual(frame, file, line, function, *source).partition("\n")
        return f"{header.rstrip()}{end}{lines}"

    vars(shell.InteractiveTB)["format_record"] = format_record


class DescriptorStream(OutStream):
    """A stream that can wait for text that was written to its file descriptor.

    Flushing a stream without new text takes no time.  This is important, because each cell flushes
    both streams twice, and each flush of ipykernel waits for another thread.
    """

    _fid: Any
    _should_watch = False
    """True if a thread reads the descriptor; ipykernel 6 sets this only if it starts a thread."""
    has_written = False
    """True if there may be text that is not sent yet."""

    def set_parent(self, parent: Any) -> None:
        """Set the request whose cell writes the text.

        Each ``write`` of ipykernel hashes all fields of the request's header, so keep only two.
        """
        header = parent.get("header", {})
        kept = {name: header[name] for name in ("msg_id", "session") if name in header}
        super().set_parent(kept and {"header": kept})  # type: ignore[no-untyped-call]

    def write(self, string: str) -> Any:
        """Write to the notebook, and return the number of characters."""
        self.has_written = True
        return super().write(string)

    def flush(self) -> None:
        """Send the written text, and return once it is sent."""
        if self.has_written:
            self.has_written = False
            super().flush()  # type: ignore[no-untyped-call]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._passing_on = threading.Lock()
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]

    def settle(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the text in the descriptor has reached this stream."""
        if not reads_descriptors.works or not self._should_watch:
            return
        deadline = time.monotonic() + seconds
        while any(fcntl.ioctl(self._fid, termios.FIONREAD, bytes(4))):  # the pipe holds text
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
                    data = os.read(self._fid, READ_BYTES)
                    if not data:
                        return
                    self.write(data.decode(errors="replace"))
                    os.write(self._original_stdstream_copy, data)
        except Exception:  # noqa: BLE001  ipykernel shows the error when the stream is closed
            self._exc = sys.exc_info()
