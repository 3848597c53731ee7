"""Runs the user's code as an IPython cell, interrupts it, and says how it failed (ranks)."""

import contextlib
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar

from IPython.core.interactiveshell import ExecutionInfo

from ddpnb.compat import torch_internals
from ddpnb.compat.ipykernel_internals import DescriptorStream
from ddpnb.protocol.messages import CellReport, CellSpec
from ddpnb.rank.collectives.trace import TraceRecorder, recording
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.failures import (
    RENDERS_ITSELF,
    failure_of,
    is_consequence,
    release_frames,
    traceback_of,
)
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.shell import questions, variable_names
from ddpnb.rank.torchrun import process_of, run_script

DRAIN_SECONDS = 0.2
"""How long a cell may wait at its end for the output of C code and child processes."""

Result = TypeVar("Result")


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run a cell in this rank's IPython and report how it ended.

    Output, figures and the value of the last expression go through the engine's own output channel
    while the cell runs.
    """
    publishing = closing(Publisher(rank=engine.group.rank, run_id=spec.run_id))
    adopted = engine.adopted_group.during()
    with publishing as publisher, traced(spec, engine) as recorder, adopted:
        engine.publisher = publisher
        errors = run_source(spec, engine)
    failure = failure_of(errors[0], engine) if errors else None
    if errors and (isinstance(errors[0], KeyboardInterrupt) or is_consequence(errors[0])):
        for error in errors:
            release_frames(error)
    return CellReport(
        rank=engine.group.rank,
        failure=failure,
        num_collectives=torch_internals.num_collectives(),
        num_batches_sent=publisher.num_batches,
        names=variable_names(engine.shell),
        trace=None if recorder is None else recorder.spans(),
    )


def traced(
    spec: CellSpec, engine: RankEngine
) -> contextlib.AbstractContextManager[TraceRecorder | None]:
    """Return a context in which a cell's exchanges are recorded, if they are to be."""
    return recording(engine.group.rank) if spec.is_traced else contextlib.nullcontext()


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


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no interrupt into a short piece of code: the kernel repeats it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def run_source(spec: CellSpec, engine: RankEngine) -> list[BaseException]:
    """Run a cell's source; return the errors of it, first the one that it failed with."""
    engine.shell.execution_count = spec.execution_count
    was_aborted = engine.group.cancellation.is_aborted
    warn_again()
    try:
        with errors_shown_by(engine) as shown, questions(spec, engine.group.rank, engine.answers):
            error = execute(spec, engine)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, DescriptorStream):  # else the user has redirected it
                stream.settle(DRAIN_SECONDS)
    except KeyboardInterrupt as interrupt:  # it came just after the cell had ended
        error = interrupt
    ended_with = [] if error is None or is_success(error) else [error]
    errors = [*shown, *ended_with] or aborted(engine, was_aborted=was_aborted)
    if isinstance(error, KeyboardInterrupt):
        # An interrupt ends the cell; another may come while IPython remembers the first, and at an
        # ``await`` IPython shows before it what it cancels.
        errors.sort(key=lambda each: not isinstance(each, KeyboardInterrupt))
    return errors


def execute(spec: CellSpec, engine: RankEngine) -> BaseException | None:
    """Run a cell or a script; return the error that ended it, if one did."""
    shell = engine.shell
    if spec.script is None:
        return interruptible(lambda: execute_cell(spec, shell))
    try:
        with process_of(spec.script, engine.group.device):
            return interruptible(lambda: execute_script(spec, shell))
    finally:
        gc.collect()  # its functions and variables refer to each other, and some to a GPU's memory


def execute_cell(spec: CellSpec, shell: Any) -> BaseException | None:
    """Run a cell; return the error that ended it, if one did."""
    result = shell.run_cell(spec.source, store_history=True)
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def execute_script(spec: CellSpec, shell: Any) -> BaseException | None:
    """Run a script in the process that is prepared for it; return the error that ended it."""
    assert spec.script is not None
    shell.events.trigger("pre_execute")
    try:
        run_script(spec.script, spec.source, namespace=shell.user_ns)
    except (Exception, SystemExit) as failure:  # noqa: BLE001  the edge of the user's code
        shell.showtraceback()
        return failure
    finally:
        shell.events.trigger("post_execute")  # as matplotlib's figures need it
    return None


def announce(source: str, shell: Any) -> None:
    """Announce a cell that the shell does not run itself, e.g. to ``%autoreload``."""
    info = ExecutionInfo(source, False, True, True, None)
    shell.events.trigger("pre_run_cell", info)


def warn_again() -> None:
    """Have each warning shown once a cell or training, not once a process."""
    warnings.filterwarnings("ignore", "To exit: use")  # IPython's, where sys.exit ends a cell
    with warnings.catch_warnings():  # leaving it marks what the modules remember as out of date
        pass


@contextlib.contextmanager
def errors_shown_by(engine: RankEngine) -> Iterator[list[BaseException]]:
    """Collect the errors that IPython shows, even if it does not raise them, as in ``%run``.

    Each traceback is formatted once, for what IPython shows and keeps and for the notebook: a file
    of torch takes it a quarter of a second, and all ranks may fail at once.
    """
    shown: list[BaseException] = []
    shell = engine.shell
    show = shell.showtraceback

    def record(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        if is_success(error):
            return
        with undisturbed():
            if error is not None:  # else %tb shows an earlier error again
                shown.append(error)
                lines = traceback_of(error, engine)
                BaseException.__setattr__(error, RENDERS_ITSELF, lambda: lines)
            show(exc_tuple, *args, **options)

    shell.showtraceback = record
    try:
        yield shown
    finally:
        if shell.showtraceback is record:  # else the cell has replaced it
            shell.showtraceback = show


def is_success(error: BaseException | None) -> bool:
    """Return whether an exception is the end of code that has succeeded: ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def aborted(engine: RankEngine, *, was_aborted: bool) -> list[BaseException]:
    """Return an error if the cell saw meaningless tensors: a collective of it was aborted.

    ``was_aborted``: whether the group was before the cell, whose own calls then all raise.
    """
    token, can_abort = engine.group.cancellation, engine.group.can_abort
    if can_abort and not was_aborted:
        try:
            token.check()
        except RuntimeError as error:
            return [error]
    return []
