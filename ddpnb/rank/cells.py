"""Runs a cell with IPython, handles interrupts and describes errors.  Runs on the ranks."""

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
from itertools import pairwise
from typing import Any, TypeVar

import IPython
from torch.nn.parallel import DistributedDataParallel

from ddpnb.compat.asyncio_internals import users_loop
from ddpnb.compat.ipykernel_internals import streams
from ddpnb.protocol.cell_messages import CellReport, CellSpec, Failure
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import process_log
from ddpnb.rank import process_end
from ddpnb.rank.cancellation import (
    ConsequenceError,
    RunCancelledError,
    is_consequence,
    sendable,
    text_of,
)
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.collectives.mismatch import CollectiveMismatchError
from ddpnb.rank.collectives.trace import TraceRecorder
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.publisher import Publisher
from ddpnb.rank.shell import questions
from ddpnb.rank.stack import OWN_FOLDER, is_users, linked, with_cell_names
from ddpnb.rank.torchrun import process_of, run_script, show_group
from ddpnb.rank.variables import variables_with_group

OUTPUT_SECONDS = 0.2
"""Maximum seconds that a rank waits after a cell for output from C code and child processes."""

UNKNOWN_GROUP = re.compile("not initialized in the world group map|Group .* is not registered")
"""Matches torch's errors about a group that has ended."""

Result = TypeVar("Result")


def run_cell(spec: CellSpec, engine: RankEngine) -> CellReport:
    """Run a cell in this rank's IPython and report how the cell ended.

    While the cell runs, the engine's output channel sends the cell's output, the figures and the
    value of the last expression.
    """
    rank = engine.group.rank
    with contextlib.suppress(FileNotFoundError):  # a clean-up service may have removed the file
        os.truncate(process_log(engine.group.folder, rank), 0)  # keep only this cell's output
    for name in ("stdout", "stderr"):
        process_log(engine.group.folder, f"{rank}.{name}").unlink(missing_ok=True)
    engine.num_outputs = 0
    with contextlib.ExitStack() as opened:
        publisher = opened.enter_context(closing(Publisher(rank=rank, run_id=spec.run_id)))
        engine.publisher = publisher
        if spec.run_id:
            opened.enter_context(listening(publisher))
        recorder = opened.enter_context(listening(TraceRecorder(rank))) if spec.is_traced else None
        opened.callback(show_group)
        errors = run_source(spec, engine)
    failure = failure_of(errors[0], engine) if errors else None
    if failure and (failure.is_consequence or issubclass(type(errors[0]), KeyboardInterrupt)):
        for error in errors:
            with contextlib.suppress(Exception):  # from a property of the user's exception
                release_frames(error)
    return CellReport(
        failure=failure,
        num_collectives=engine.group.collective_checks.num_made,
        trace=None if recorder is None else recorder.spans(),
        is_silent=engine.end_cell(),
    )


def interruptible(call: Callable[[], Result], *, is_cell: bool = False) -> Result:
    """Call a function that runs the user's code, and return the function's result.

    SIGINT raises ``KeyboardInterrupt`` only during this call.  At other times, an interrupt could
    make the engine lose a message, and the kernel would wait for the answer forever.
    """
    with users_loop(is_cell=is_cell):
        try:
            try:
                signal.signal(signal.SIGINT, raise_interrupt)
                return call()
            finally:
                signal.signal(signal.SIGINT, ignore)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, ignore)  # SIGINT may have come before ``finally`` did this
            raise


def raise_interrupt(number: int, frame: object) -> None:
    """Raise ``KeyboardInterrupt``, unless a library is being imported.

    The handler of ``asyncio.run`` would not end code that never waits, and ``asyncio.run`` replaces
    only Python's own handler.  A library that is imported only in part can fail later, so ddpnb
    ignores the interrupt.  The notebook interrupts again.
    """
    for each in linked(frame, "f_back"):
        if each.f_code.co_name == "<module>" and "site-packages" in each.f_code.co_filename:
            return
    raise KeyboardInterrupt


def ignore(number: int, frame: object) -> None:
    """Ignore a signal.  Unlike ``SIG_IGN``, this handler is not inherited by child processes."""


def run_source(spec: CellSpec, engine: RankEngine) -> list[BaseException]:
    """Run a cell's source.  Return a list of all errors, beginning with the error to report."""
    engine.shell.execution_count = spec.execution_count
    was_aborted = engine.group.cancellation.is_aborted
    warn_again()
    try:
        with (
            errors_shown_by(engine.shell) as shown,
            questions(spec, engine.group.rank, engine.answers),
        ):
            error = execute(spec, engine)
        for stream in streams():
            stream.settle(OUTPUT_SECONDS)
    except KeyboardInterrupt as interrupt:  # it came just after the cell's end
        error = interrupt
    errors = [*shown] if error is None or is_success(error) else [*shown, error]
    is_aborted = engine.group.cancellation.is_aborted and not was_aborted
    if not errors and is_aborted and engine.group.can_abort:  # the cell got invalid tensors
        errors = [ConsequenceError("This rank was released from its wait.")]
    if issubclass(type(error), KeyboardInterrupt):
        # List the interrupt before errors that IPython recorded at the same time.
        errors.sort(key=lambda each: not issubclass(type(each), KeyboardInterrupt))
    return errors


def execute(spec: CellSpec, engine: RankEngine) -> BaseException | None:
    """Run a cell or a script; return its error, or None if the code succeeded."""
    shell = engine.shell
    if spec.script is None:
        run_cell = partial(shell.run_cell, spec.source, store_history=True)
        result = interruptible(run_cell, is_cell=True)
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error
    mark, script = process_end.mark_now(), spec.script

    def run() -> None:
        seconds = None
        try:
            run_script(script, spec.source, namespace=shell.user_ns)
        except (Exception, KeyboardInterrupt):
            seconds = process_end.FAILED_SECONDS
            raise
        finally:
            end = process_end.join_threads if script.keeps_variables else process_end.end
            end(mark, seconds)

    try:
        with process_of(script, engine.group.device):
            interruptible(run)
    except (Exception, SystemExit) as failure:  # noqa: BLE001  the user's code
        shell.showtraceback()
        return failure
    finally:
        shell.events.trigger("post_execute")  # matplotlib shows its figures on this event
        gc.collect()  # frees reference cycles, which may hold GPU memory
        if not script.keeps_variables:
            interruptible(partial(process_end.finalize, mark))
    return None


def warn_again() -> None:
    """Make Python show each warning once per cell or run, instead of once per process."""
    warnings.filterwarnings("ignore", "To exit: use")  # IPython's warning if sys.exit ends a cell
    with warnings.catch_warnings():  # its end makes modules forget the warnings that they showed
        pass


@contextlib.contextmanager
def errors_shown_by(shell: Any) -> Iterator[list[BaseException]]:
    """Collect all errors that IPython would show, including errors that ``%run`` does not raise.

    The notebook shows the collected errors.  IPython stores only the last error, for ``%debug``.
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
        if shell.showtraceback is record:  # otherwise the cell has replaced it
            shell.showtraceback = show


def is_success(error: BaseException | None) -> bool:
    """Return True if an exception means success, such as ``SystemExit`` after ``sys.exit(0)``."""
    is_exit = issubclass(type(error), SystemExit)  # the user's class may replace every attribute
    return is_exit and vars(SystemExit)["code"].__get__(error) in (None, 0)


# -- how code failed -----------------------------------------------------------------------


def failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception that has just been caught, as a ``Failure`` for the notebook."""
    try:
        return safe_failure_of(error, engine)
    except BaseException:  # noqa: BLE001  a method or property of the user's exception
        links = [*linked(vars(BaseException)["__traceback__"].__get__(error), "tb_next")]
        users = [each for each in links if is_users(each.tb_frame)]
        return Failure(
            rank=engine.group.rank,
            name=sendable(type(error).__name__),
            text=text_of(error),
            traceback=tuple(map(with_cell_names, traceback.format_tb([*users, *links][0]))),
            failed_at=time.time(),
        )


def safe_failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception like ``failure_of``.  A method of the exception may raise an error."""
    is_cause = not is_consequence(error)
    error = explained(error, engine)
    return Failure(
        rank=engine.group.rank,
        name=sendable(type(error).__name__),
        text=said_by(error),
        traceback=tuple(
            with_cell_names(sendable(line)) for line in traceback_of(error, engine.shell)
        ),
        failed_at=time.time(),
        line=user_line(error),
        is_consequence=not is_cause,
        was_waiting=not isinstance(error, RunCancelledError),
        breaks_group=isinstance(error, CollectiveMismatchError),
    )


def user_line(error: BaseException) -> int:
    """Return the line of the user's code at which an error occurred, or 0 for an error elsewhere.

    If the error occurred in a function from another cell, return the line that calls the function.
    """
    found = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame) and line is not None
    ]
    return [line for file, line in found if file == found[0][0]][-1] if found else 0


def said_by(error: BaseException) -> str:
    """Return the text that the notebook shows as an exception's message."""
    if isinstance(error, BdbQuit):
        return "quit ends the debugger and the cell; use continue to run the rest of the cell"
    return text_of(error.msg if isinstance(error, SyntaxError) else error)


def explained(error: BaseException, engine: RankEngine) -> BaseException:
    """Return the error, or a ``UserError`` that explains it.

    If DDP waits for unused parameters, the ``UserError`` names them.  If the code seems to use an
    aborted process group, the ``UserError`` names its variables.
    """
    now = variables_with_group(engine.shell.user_ns) if engine.stale else {}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    used = {name for each in frames if is_users(each) for name in each.f_code.co_names}
    stale = [
        each.sentence()
        for each, number in now.items()
        if engine.stale.get(each) == number and re.split(r"\W", each.name)[0] in used
    ]
    is_raw = is_consequence(error) and not isinstance(error, ConsequenceError)
    if stale and (is_raw or UNKNOWN_GROUP.search(text_of(error))):
        return UserError(" ".join(stale[:3])).with_traceback(error.__traceback__)
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text_of(error))
    for model in (frame.f_locals.get("self") for frame in frames if numbers):
        if numbers and isinstance(model, DistributedDataParallel):
            names = [
                name
                for name, parameter in model.module.named_parameters()
                if parameter.requires_grad and name not in model.parameters_to_ignore
            ]
            unused = [names[int(number)] for number in numbers[1].split()]
            more = f" and {len(unused) - 3} more" * (len(unused) > 3)
            return UserError(
                f"{', '.join(unused[:3])}{more} did not contribute to the loss of the previous "
                "step, so DDP still waits for their gradients. Create DDP with "
                "find_unused_parameters=True, or remove the parameters that no loss uses."
            ).with_traceback(error.__traceback__)
    return error


def traceback_of(error: BaseException, shell: Any) -> list[str]:
    """Return the formatted traceback, beginning at the first line of the user's code."""
    links = [*linked(error.__traceback__, "tb_next")]
    users = [each for each in links if is_users(each.tb_frame)]
    is_for_users = isinstance(error, UserError | SystemExit)
    if isinstance(error, BdbQuit) or (is_for_users and not users):
        return []  # the message is enough
    if users and isinstance(error, CollectiveMismatchError | UserError):
        users[-1].tb_next = None
    if isinstance(error, KeyboardInterrupt):  # hide what ddpnb did when the interrupt came
        for before, after in pairwise(links[links.index(users[-1]) if users else -2 :]):
            if after.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
                before.tb_next = None
    own = (OWN_FOLDER, IPython.__path__[0])
    others = [each for each in links if not each.tb_frame.f_code.co_filename.startswith(own)]
    frames = [*users, *others, error.__traceback__][0]
    if is_plain(error):
        text = "".join(traceback.format_exception(type(error), error, frames))
        return sendable(text).splitlines()
    if isinstance(error, SyntaxError) and not users and not others:
        lines: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, [])
    else:
        lines = shell.InteractiveTB.structured_traceback(type(error), error, frames, tb_offset=0)
    return lines


def is_plain(error: BaseException) -> bool:
    """Return True if the notebook shows Python's traceback instead of IPython's.

    IPython formats tracebacks slowly, and an interrupt or one rank's failure can make many ranks
    fail at once.  Between two instructions, a frame can lack a line number, and IPython cannot
    format such a frame.
    """
    if isinstance(error, KeyboardInterrupt) or is_consequence(error):
        return True
    tracebacks = (each.__traceback__ for each in linked(error, "__context__"))
    return any(line is None for each in tracebacks for _, line in traceback.walk_tb(each))


def release_frames(error: BaseException) -> None:
    """Clear the variables of an interrupted cell's frames, so that a DataLoader's workers end.

    IPython keeps the last traceback, and the traceback keeps the variables of each frame alive.
    """
    for each in linked(error, "__context__"):
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            len(frame.f_locals)  # this read empties Python 3.11's copy of the variables
