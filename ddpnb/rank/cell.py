"""How does a notebook cell run on this rank?  As a real IPython cell.  (Rank side.)"""

import fcntl
import os
import re
import resource
import signal
import stat
import sys
import termios
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import IPython

import ddpnb
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.monitor import num_collectives
from ddpnb.rank.publish import Publisher
from ddpnb.wire import CellReport, CellSpec, Failure

CLOSED_CONNECTION = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Socket closed")
"""What gloo says on a rank whose peer has gone, or whose own sockets were cut."""

NOT_THE_USERS = tuple(package.__path__[0] for package in (ddpnb, IPython))
"""Where the code lies that stands between the engine and what the user wrote."""

DRAIN_SECONDS = 0.2
"""How long a cell's end may wait for the output of its child processes."""
SETTLE_SECONDS = 0.003

Result = TypeVar("Result")


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run the cell in this rank's IPython and report how it ended.

    Output, displayed figures and the last expression's value leave by the engine's
    own output channel while the cell runs.
    """
    with Publisher(rank=engine.group.rank, run_id=spec.run_id) as publisher:
        engine.publisher = publisher
        error = run_source(spec, engine)
    return CellReport(
        rank=engine.group.rank,
        failure=None if error is None else failure_of(error, engine),
        num_collectives=num_collectives(),
        num_batches_sent=publisher.num_batches,
    )


def run_source(spec: CellSpec, engine: RankEngine) -> BaseException | None:
    """Run what the cell says; return what it failed with."""
    shell = engine.kernel.shell
    shell.execution_count = spec.execution_count
    faults = children_page_faults()
    try:
        result = interruptible(lambda: shell.run_cell(spec.source, store_history=True))
        wait_for_children_output(children_page_faults() > faults)
    except KeyboardInterrupt as interrupt:  # it came when the cell had just ended
        return interrupt
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def wait_for_children_output(had_children: bool) -> None:
    """Wait, not for long, until what child processes wrote to stdout and stderr has been read.

    ipykernel reads it from a pipe, in a thread of its own; what it reads after the cell
    has ended belongs to no cell.
    """
    deadline = time.monotonic() + DRAIN_SECONDS
    while any(map(num_unread, (1, 2))) and time.monotonic() < deadline:
        had_children = True
        time.sleep(SETTLE_SECONDS)
    if had_children:
        time.sleep(SETTLE_SECONDS)  # the thread may have read it and not yet handed it on


def children_page_faults() -> int:
    """Return a number that grows with each child process that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def num_unread(descriptor: int) -> int:
    """Return how many bytes wait in a pipe; 0 where the descriptor is none."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(answer, sys.byteorder)


def interruptible(call: Callable[[], Result]) -> Result:
    """Call what the user wrote: SIGINT raises ``KeyboardInterrupt`` here and nowhere else.

    In the midst of a message it would lose the message, and whoever waits for the
    answer would wait for ever.
    """
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return call()
        finally:
            signal.signal(signal.SIGINT, ignore)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, ignore)  # it may have come just before the same above
        raise


def ignore(number: int, frame: object) -> None:
    """Handle a signal by doing nothing.  Unlike ``SIG_IGN``, child processes do not inherit it."""


def failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception that has just been caught, for the notebook."""
    return Failure(
        rank=engine.group.rank,
        name=type(error).__name__,
        text=str(error.msg if isinstance(error, SyntaxError) else error),
        traceback=tuple(traceback_of(error, engine)),
        failed_at=time.time(),
        is_consequence=is_consequence(error),
    )


def traceback_of(error: BaseException, engine: RankEngine) -> list[str]:
    """Return the formatted traceback, from the user's first line on."""
    shell, frames = engine.kernel.shell, users_part(error.__traceback__)
    if isinstance(error, SyntaxError) and frames is None:
        lines: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, [])
    else:
        lines = shell.InteractiveTB.structured_traceback(
            type(error), error, frames or error.__traceback__, tb_offset=0
        )
    return lines


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame on; None where it has none of theirs."""
    while frames and frames.tb_frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frames = frames.tb_next
    return frames


def is_consequence(error: BaseException) -> bool:
    """Tell whether an exception says only that the connection to another rank is gone."""
    return isinstance(error, RuntimeError) and CLOSED_CONNECTION.search(str(error)) is not None
