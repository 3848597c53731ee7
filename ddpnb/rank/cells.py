"""How does a notebook cell run on this rank?  As a real IPython cell.  (Rank side.)"""

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
"""How long a cell's end may wait for the output of its child processes."""
SETTLE_SECONDS = 0.003


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


Result = TypeVar("Result")


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run the cell in this rank's IPython and report how it ended.

    Output, displayed figures and the last expression's value leave by the engine's
    own output channel while the cell runs.
    """
    with Publisher(rank=engine.group.rank, run_id=spec.run_id) as publisher:
        engine.publisher = publisher
        error = run_source(spec, engine)
    failure = None if error is None else failure_of(error, engine)
    if isinstance(error, KeyboardInterrupt) or (error and is_consequence(error)):
        let_go(error)
    return CellReport(
        rank=engine.group.rank,
        failure=failure,
        num_collectives=num_collectives(),
        num_batches_sent=publisher.num_batches,
    )


def run_source(spec: CellSpec, engine: RankEngine) -> BaseException | None:
    """Run what the cell says; return what it failed with."""
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
    if isinstance(error, KeyboardInterrupt):  # at an ``await`` IPython shows what it cancels first
        return error
    return next(iter(shown), error) or aborted(engine)


@contextlib.contextmanager
def errors_shown_by(shell: InteractiveShell) -> Iterator[list[BaseException]]:
    """Collect the errors that IPython shows, also those that it does not raise, as in ``%run``."""
    shown: list[BaseException] = []
    show = shell.showtraceback

    def record(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None:  # else an earlier one is shown again, as by %tb
            shown.append(error)
        show(exc_tuple, *args, **options)

    shell.showtraceback = record  # type: ignore[method-assign]
    try:
        yield shown
    finally:
        if shell.showtraceback is record:  # the cell may have put another in its place
            shell.showtraceback = show  # type: ignore[method-assign]


def aborted(engine: RankEngine) -> BaseException | None:
    """Return an error where NCCL was aborted under a cell: it went on with meaningless tensors."""
    if engine.group.is_aborted_to_end:
        try:
            engine.group.cancellation.check()
        except RuntimeError as error:
            return error
    return None


def let_go(error: BaseException) -> None:
    """Drop what the frames of an interrupted cell hold: a DataLoader's workers end with it.

    IPython keeps the last traceback, and with it each frame's variables and loops.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        for frame, _ in traceback.walk_tb(chain.__traceback__):
            len(frame.f_locals)  # asking renews Python 3.11's copy: empty now
        chain = chain.__context__


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
