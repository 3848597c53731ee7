"""Uses private parts of ipykernel and IPython.  Runs on the ranks.

C code and child processes write text to a stream's file descriptor.  A thread of ipykernel reads
and forwards this text.  This module can wait until this thread has forwarded all text.  Text that
the thread forwards after the end of a cell would not appear in the cell.

A cell may print more text than ddpnb and the browser can hold.  Then each stream shows the
beginning and the end of this flood, and writes the middle to a file.
"""

import codecs
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
from functools import partial
from io import StringIO
from typing import Any

from ipykernel.iostream import OutStream
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.ultratb import VerboseTB

from ddpnb.compat.probe import Probe

POLL_SECONDS = 0.003
STREAM_BYTES = 65_536
"""Maximum number of bytes to read from a descriptor at once: the size of a pipe."""
MIRROR_BYTES = 4_000_000
"""Size at which the log of a descriptor's text begins again.  The log may take memory."""
SHOWN_AT_ONCE = 1_000_000
"""Number of characters that all ranks together show at once on each stream of a cell.

Jupyter's server drops text beyond 3 MB in 3 s (``iopub_data_rate_limit``).
"""
SHOWN_PER_SECOND = 5_000
"""Number of further characters that each rank shows for each second."""
SHOWN_END = 100_000
"""Minimum number of characters that all ranks together show of the end of a flood."""
SHOWN_LEAST = 10_000
"""Minimum share of one rank in ``SHOWN_AT_ONCE`` and ``SHOWN_END``."""
KEPT_BYTES = 32_000_000
"""Maximum size of the file with the middle of a flood.  The file may take memory."""
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


class Header(dict[str, Any]):
    """A dictionary that can have attributes."""


def streams() -> "list[DescriptorStream]":
    """Return this process's stdout and stderr, unless the user has redirected them."""
    return [each for each in (sys.stdout, sys.stderr) if isinstance(each, DescriptorStream)]


class DescriptorStream(OutStream):
    """A stream that can wait for text that was written to its file descriptor.

    Flushing a stream without new text takes no time.  This is important, because each cell flushes
    both streams twice, and each flush of ipykernel waits for another thread.
    """

    path = "%s.log"
    """The file for the middle of a flood.  ``%s`` becomes the stream's name."""
    num_ranks = 1
    """The number of ranks that share the limits."""
    _fid: Any
    _should_watch = False
    """True if a thread reads the descriptor; ipykernel 6 sets this only if it starts a thread."""
    has_written = False
    """True if there may be text that is not sent yet."""
    _room: int
    """Number of characters that may be shown now."""
    _held: StringIO | None = None
    """The latest text of a flood, which is not shown yet; None if there is no flood."""

    def set_parent(self, parent: Any) -> None:
        """Set the request whose cell writes the text.

        Each ``write`` of ipykernel hashes the items of the request's header.  So keep only two
        items, in a set, which computes its hash only once.
        """
        header = parent.get("header", {})
        kept = Header({name: header[name] for name in ("msg_id", "session") if name in header})
        vars(kept)["items"] = partial(frozenset, frozenset(kept.items()))
        super().set_parent(kept and {"header": kept})  # type: ignore[no-untyped-call]

    def write(self, string: str) -> Any:
        """Write to the notebook, and return the number of characters."""
        if isinstance(string, str):  # otherwise ipykernel raises an error
            self._room -= len(string)
            if self._room <= 0:
                return self._limit(string)
        self.has_written = True
        return OutStream.write(self, string)  # ``super`` would take longer

    def flush(self) -> None:
        """Send the written text, and return once it is sent."""
        if self.has_written:
            self.has_written = False
            super().flush()  # type: ignore[no-untyped-call]

    def end_call(self) -> None:
        """Show the end of a flood.  The next call may print as much as this call."""
        with self._holding:
            self._end_flood()
            self._room, self._granted_at = self._at_once, time.monotonic()

    def __init__(self, *args: Any, **options: Any) -> None:
        self._passing_on = threading.Lock()
        self._holding = threading.RLock()  # a signal handler may print too
        self._granted_at = time.monotonic()
        self._at_once: int = max(SHOWN_LEAST, SHOWN_AT_ONCE // self.num_ranks)
        self._end = max(SHOWN_LEAST, SHOWN_END // self.num_ranks)
        self._room = self._at_once
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
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        readable = select.poll()
        readable.register(self._fid, select.POLLIN)
        try:
            while self._should_watch:
                readable.poll()
                with self._passing_on:
                    data = os.read(self._fid, STREAM_BYTES)
                    if not data:
                        return
                    self.write(decode(data))
                    if os.fstat(self._original_stdstream_copy).st_size > MIRROR_BYTES:
                        os.ftruncate(self._original_stdstream_copy, 0)
                    os.write(self._original_stdstream_copy, data)
        except Exception:  # noqa: BLE001  ipykernel shows the error when the stream is closed
            self._exc = sys.exc_info()

    def _limit(self, string: str) -> int:
        """Write as much of a text as may be shown now.  Hold the rest back until the flood ends."""
        with self._holding:
            now = time.monotonic()
            earned, num_shown = int((now - self._granted_at) * SHOWN_PER_SECOND), 0
            if self._held is None:
                self._room, self._granted_at = self._room + min(earned, self._end), now
                num_shown = max(0, len(string) + min(0, self._room))
                self.has_written = True
                OutStream.write(self, string[:num_shown])
                if self._room > 0:
                    return len(string)
                self._separator = "" if string[:num_shown].endswith("\n") else "\n"
                self._num_left_out, self._num_kept, self._held = 0, 0, StringIO()
            for at in range(num_shown, len(string), self._end):
                self._held.write(string[at : at + self._end])
                if self._held.tell() > 2 * self._end:
                    text = self._held.getvalue()
                    self._leave_out(text[: -self._end])
                    self._held = StringIO()
                    self._held.write(text[-self._end :])
            if earned > 2 * self._end:
                self._end_flood()
                self._room, self._granted_at = self._end, now
            return len(string)

    def _leave_out(self, text: str) -> None:
        """Append a text to the file.  If this fails, only count its characters."""
        if self._num_kept == self._num_left_out:
            data = text.encode(errors="backslashreplace")
            with contextlib.suppress(OSError), open(self.path % self.name, "ab") as file:
                if file.tell() + len(data) <= KEPT_BYTES:
                    file.write(data)
                    file.flush()
                    self._num_kept += len(text)
        self._num_left_out += len(text)

    def _end_flood(self) -> None:
        """Write the text that is held back, after a sentence about the text that is left out."""
        text, self._held = self._held.getvalue() if self._held else "", None
        if text and self._num_left_out:
            kept, path = self._num_kept, self.path % self.name
            which = "They" if kept == self._num_left_out else f"The first {kept:,} of them"
            place = f"{which} are in {path} until the next cell." if kept else "They are lost."
            notice = f"ddpnb left out {self._num_left_out:,} characters here. {place}"
            text = f"{self._separator}{notice}\n{text}"
        if text:
            self.has_written = True
            OutStream.write(self, text)
