"""Runs the user's code as an IPython cell, interrupts it, and describes how it failed (ranks)."""

import contextlib
import gc
import os
import re
import signal
import sys
import time
import traceback
import warnings
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from types import FrameType, TracebackType
from typing import Any, TypeVar

import IPython
from torch.nn.parallel import DistributedDataParallel

from ddpnb.compat.ipykernel_internals import DescriptorStream
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import CellReport, CellSpec, Failure
from ddpnb.protocol.processes import process_log
from ddpnb.rank.cancellation import ConsequenceError, RunCancelledError, is_consequence, text_of
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.collectives.mismatch import CollectiveMismatchError
from ddpnb.rank.collectives.trace import TraceRecorder
from ddpnb.rank.engine import RankEngine, id_of
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.shell import questions
from ddpnb.rank.stack import OWN_FOLDER, is_users
from ddpnb.rank.torchrun import process_of, run_script

DRAIN_SECONDS = 0.2
"""The longest wait at a cell's end for the output of C code and child processes."""

Result = TypeVar("Result")


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run a cell in this rank's IPython and report how the cell ended.

    While the cell runs, the engine's output channel sends its output, its figures and the value of
    its last expression.
    """
    rank = engine.group.rank
    os.truncate(process_log(engine.group.folder, rank), 0)  # keep only this cell's output
    cell, num_outputs = id_of(engine.kernel.get_parent("shell")), engine.sending.num_outputs
    with contextlib.ExitStack() as opened:
        publisher = opened.enter_context(closing(Publisher(rank=rank, run_id=spec.run_id)))
        engine.publisher = publisher
        if spec.run_id:
            opened.enter_context(listening(publisher))
        recorder = opened.enter_context(listening(TraceRecorder(rank))) if spec.is_traced else None
        opened.enter_context(engine.adopted_group.during())
        errors = run_source(spec, engine)
    failure = failure_of(errors[0], engine) if errors else None
    if errors and (isinstance(errors[0], KeyboardInterrupt) or is_consequence(errors[0])):
        for error in errors:
            release_frames(error)
    return CellReport(
        failure=failure,
        num_collectives=engine.group.collective_checks.num_made,
        trace=None if recorder is None else recorder.spans(),
        is_silent=engine.sending.end_cell(cell, num_outputs),
    )


def interruptible(call: Callable[[], Result]) -> Result:
    """Call the user's code.  SIGINT raises ``KeyboardInterrupt`` only during this call.

    If SIGINT interrupted the engine while it handles a message, the message would be lost, and the
    kernel would wait for the answer forever.
    """
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return call()
        finally:
            signal.signal(signal.SIGINT, ignore)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, ignore)  # SIGINT may have come before ``finally`` did this
        raise


def ignore(number: int, frame: object) -> None:
    """Do nothing.  Unlike ``SIG_IGN``, child processes do not inherit this handler."""


def run_source(spec: CellSpec, engine: RankEngine) -> list[BaseException]:
    """Run a cell's source; return its errors, beginning with the error that ended the cell."""
    engine.shell.execution_count = spec.execution_count
    was_aborted = engine.group.cancellation.is_aborted
    warn_again()
    try:
        with (
            errors_shown_by(engine.shell) as shown,
            questions(spec, engine.group.rank, engine.answers),
        ):
            error = execute(spec, engine)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, DescriptorStream):  # else the user has redirected it
                stream.settle(DRAIN_SECONDS)
    except KeyboardInterrupt as interrupt:  # just after the cell had ended
        error = interrupt
    errors = [*shown] if error is None or is_success(error) else [*shown, error]
    is_aborted = engine.group.cancellation.is_aborted and not was_aborted
    if not errors and is_aborted and engine.group.can_abort:  # the cell saw meaningless tensors
        errors = [ConsequenceError("This rank was released from its wait.")]
    if isinstance(error, KeyboardInterrupt):
        # The interrupt ends the cell, so it precedes errors that IPython noted at the same time.
        errors.sort(key=lambda each: not isinstance(each, KeyboardInterrupt))
    return errors


def execute(spec: CellSpec, engine: RankEngine) -> BaseException | None:
    """Run a cell or a script; return the error that ended it, or None."""
    shell = engine.shell
    if spec.script is None:
        result = interruptible(lambda: shell.run_cell(spec.source, store_history=True))
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error
    run = partial(run_script, spec.script, spec.source, namespace=shell.user_ns)
    try:
        with process_of(spec.script, engine.group.device):
            interruptible(run)
    except (Exception, SystemExit) as failure:  # noqa: BLE001  the edge of the user's code
        shell.showtraceback()
        return failure
    finally:
        shell.events.trigger("post_execute")  # matplotlib shows its figures on this event
        gc.collect()  # frees cycles of functions and variables, which may hold a GPU's memory
    return None


def warn_again() -> None:
    """Show each warning once per cell or training instead of once per process."""
    warnings.filterwarnings("ignore", "To exit: use")  # IPython's, when sys.exit ends a cell
    with warnings.catch_warnings():  # on exit, modules forget the warnings that they have shown
        pass


@contextlib.contextmanager
def errors_shown_by(shell: Any) -> Iterator[list[BaseException]]:
    """Collect the errors that IPython would show, also if it does not raise them, as in ``%run``.

    The notebook shows these errors.  IPython only keeps the last error, for ``%debug``.
    """
    found: list[BaseException] = []

    def record(exc_tuple: Any = None, *_: Any, **options: Any) -> None:
        kind, error, frames = exc_tuple or sys.exc_info()
        if error is not None and not is_success(error):
            found.append(error)
            sys.last_type, sys.last_value, sys.last_traceback = kind, error, frames

    show, shell.showtraceback = shell.showtraceback, record
    try:
        yield found
    finally:
        if shell.showtraceback is record:  # else the cell has replaced ``showtraceback``
            shell.showtraceback = show


def is_success(error: BaseException | None) -> bool:
    """Return True if an exception ends code that has succeeded, as ``sys.exit(0)`` does."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


# -- how code failed -----------------------------------------------------------------------


def failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception that has just been caught, for the notebook."""
    error = explained(error)
    return Failure(
        rank=engine.group.rank,
        name=type(error).__name__,
        text=said_by(error),
        traceback=tuple(traceback_of(error, engine.shell)),
        failed_at=time.time(),
        line=line_of(error),
        is_consequence=is_consequence(error),
        was_waiting=not isinstance(error, RunCancelledError),
        breaks_group=isinstance(error, CollectiveMismatchError),
    )


def line_of(error: BaseException) -> int:
    """Return the line that the cell or the script had reached; 0 if the error is in neither.

    Functions that another cell defines do not count.
    """
    found = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame) and line is not None
    ]
    return [line for file, line in found if file == found[0][0]][-1] if found else 0


def said_by(error: BaseException) -> str:
    """Return an exception's message."""
    if isinstance(error, BdbQuit):
        return "quit ends the debugger and the cell; use continue to run the rest of the cell"
    return text_of(error.msg if isinstance(error, SyntaxError) else error)


class UnusedParametersError(RuntimeError):
    """Raised if DDP waits for gradients of parameters that had no part in the loss."""


def explained(error: BaseException) -> BaseException:
    """Return the error; if DDP lacks gradients, return an error that names the parameters."""
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        model = frame.f_locals.get("self")
        if numbers and isinstance(model, DistributedDataParallel):
            names = [
                name
                for name, parameter in model.module.named_parameters()
                if parameter.requires_grad and name not in model.parameters_to_ignore
            ]
            unused = [names[int(number)] for number in numbers[1].split()]
            more = f" and {len(unused) - 3} more" * (len(unused) > 3)
            return UnusedParametersError(
                f"{', '.join(unused[:3])}{more} had no part in the loss of the previous step, so "
                "DDP still waits for gradients. Make DDP with find_unused_parameters=True, or "
                "remove parameters that no loss uses"
            ).with_traceback(error.__traceback__)
    return error


def traceback_of(error: BaseException, shell: Any) -> list[str]:
    """Return the formatted traceback, beginning at the user's first line."""
    frames = from_first(error.__traceback__, is_users)
    is_for_users = isinstance(error, UserError | SystemExit)
    if isinstance(error, BdbQuit) or (is_for_users and frames is None):
        return []  # the message is enough
    if isinstance(error, CollectiveMismatchError | UnusedParametersError | UserError):
        end_at_users(frames)
    own = (OWN_FOLDER, IPython.__path__[0])
    frames = frames or from_first(
        error.__traceback__, lambda frame: not frame.f_code.co_filename.startswith(own)
    )
    if is_plain(error):
        frames = frames or error.__traceback__
        return "".join(traceback.format_exception(type(error), error, frames)).splitlines()
    if isinstance(error, SyntaxError) and frames is None:
        lines: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, [])
    else:
        lines = shell.InteractiveTB.structured_traceback(
            type(error), error, frames or error.__traceback__, tb_offset=0
        )
    return lines


def is_plain(error: BaseException) -> bool:
    """Return True if the notebook shows Python's traceback instead of IPython's.

    IPython's traceback takes long to format.  Many ranks fail at once after an interrupt or after
    one rank's failure.  IPython's code fails if a frame has no line, as between two instructions.
    """
    if isinstance(error, KeyboardInterrupt) or is_consequence(error):
        return True
    frames = (each for link in chain_of(error) for each in traceback.walk_tb(link.__traceback__))
    return any(line is None for _, line in frames)


def from_first(
    frames: TracebackType | None, is_wanted: Callable[[FrameType], bool]
) -> TracebackType | None:
    """Return a traceback beginning at the first wanted frame; None if no frame is wanted."""
    while frames is not None and not is_wanted(frames.tb_frame):
        frames = frames.tb_next
    return frames


def end_at_users(frames: TracebackType | None) -> None:
    """Cut the traceback off after the user's innermost line, if the user has a line in it."""
    last = None
    while frames is not None:
        last = frames if is_users(frames.tb_frame) else last
        frames = frames.tb_next
    if last is not None:
        last.tb_next = None


def release_frames(error: BaseException) -> None:
    """Clear the variables of an interrupted cell's frames, so that a DataLoader's workers end.

    IPython keeps the last traceback, which holds the variables and loops of each frame.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            len(frame.f_locals)  # Python 3.11 renews its copy when it is read; now it is empty


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__context__
