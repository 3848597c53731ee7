"""A notebook cell, run on this rank as a real IPython cell (ranks)."""

import contextlib
import fcntl
import os
import resource
import signal
import stat
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from IPython.core.interactiveshell import InteractiveShell

from ddpnb.protocol.messages import CellReport, CellSpec
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.failures import failure_of, is_consequence
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.status import num_collectives

DRAIN_SECONDS = 0.2
"""How long a cell may wait at its end for the output of its child processes."""
POLL_SECONDS = 0.003

Result = TypeVar("Result")


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run a cell in this rank's IPython and report how it ended.

    Output, figures and the value of the last expression go through the engine's own output channel
    while the cell runs.
    """
    with Publisher(rank=engine.group.rank, run_id=spec.run_id) as publisher:
        engine.publisher = publisher
        error = run_source(spec, engine)
    failure = None if error is None else failure_of(error, engine)
    if isinstance(error, KeyboardInterrupt) or (error and is_consequence(error)):
        release_frames(error)
    return CellReport(
        rank=engine.group.rank,
        failure=failure,
        num_collectives=num_collectives(),
        num_batches_sent=publisher.num_batches,
    )


def interruptible(call: Callable[[], Result]) -> Result:
    """Call the user's code.  Only here does SIGINT raise ``KeyboardInterrupt``.

    While the engine handles a message, an interrupt would lose the message, and the kernel would
    wait for the answer forever.
    """
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return call()
        finally:
            signal.signal(signal.SIGINT, ignore)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, ignore)  # it may have come before the line above took effect
        raise


def ignore(number: int, frame: object) -> None:
    """Do nothing.  Unlike ``SIG_IGN``, child processes do not inherit this handler."""


def run_source(spec: CellSpec, engine: RankEngine) -> BaseException | None:
    """Run a cell's source; return the error that it failed with, if it did."""
    shell = engine.kernel.shell
    shell.execution_count = spec.execution_count
    faults = children_page_faults()
    try:
        with errors_shown_by(shell) as shown:
            result = interruptible(lambda: shell.run_cell(spec.source, store_history=True))
        wait_for_children_output(children_page_faults() > faults)
    except KeyboardInterrupt as interrupt:  # it came just after the cell had ended
        return interrupt
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    if isinstance(error, KeyboardInterrupt):  # at an ``await``, IPython first shows what it cancels
        return error
    return next(iter(shown), error) or aborted(engine)


@contextlib.contextmanager
def errors_shown_by(shell: InteractiveShell) -> Iterator[list[BaseException]]:
    """Collect the errors that IPython shows, even if it does not raise them, as in ``%run``."""
    shown: list[BaseException] = []
    show = shell.showtraceback

    def record(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None:  # else %tb shows an earlier error again
            shown.append(error)
        show(exc_tuple, *args, **options)

    shell.showtraceback = record  # type: ignore[method-assign]
    try:
        yield shown
    finally:
        if shell.showtraceback is record:  # else the cell has replaced it
            shell.showtraceback = show  # type: ignore[method-assign]


def wait_for_children_output(had_children: bool) -> None:
    """Wait a moment until the output of child processes has been read.

    A thread of ipykernel reads it from a pipe.  Output that it reads after the cell has ended
    belongs to no cell.
    """
    deadline = time.monotonic() + DRAIN_SECONDS
    while any(map(num_unread, (1, 2))) and time.monotonic() < deadline:
        had_children = True
        time.sleep(POLL_SECONDS)
    if had_children:
        time.sleep(POLL_SECONDS)  # the thread may have read the output but not yet sent it


def children_page_faults() -> int:
    """Return a number that grows whenever a child process has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def num_unread(descriptor: int) -> int:
    """Return how many bytes a pipe holds; 0 if the descriptor is not a pipe."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(answer, sys.byteorder)


def aborted(engine: RankEngine) -> BaseException | None:
    """Return an error if NCCL was aborted during the cell, which then saw meaningless tensors."""
    if engine.group.can_abort:
        try:
            engine.group.cancellation.check()
        except RuntimeError as error:
            return error
    return None


def release_frames(error: BaseException) -> None:
    """Drop the variables of an interrupted cell's frames, so that a DataLoader's workers end.

    IPython keeps the last traceback, and with it the variables and loops of each frame.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        for frame, _ in traceback.walk_tb(chain.__traceback__):
            len(frame.f_locals)  # reading it renews Python 3.11's copy, which is then empty
        chain = chain.__context__
