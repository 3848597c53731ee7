"""How did the user's code fail, and is the cause on another rank?  (ranks)"""

import time
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from types import TracebackType

import IPython
import torch

from ddpnb.compat import torch_internals
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Failure
from ddpnb.rank.cancellation import ConsequenceError, RunCancelledError
from ddpnb.rank.collectives.log import CollectiveMismatchError
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.stack import OWN_FOLDER, is_users

RENDERS_ITSELF = "_render_traceback_"
"""The attribute of an exception by which IPython shows it."""

NOT_THE_USERS = (OWN_FOLDER, IPython.__path__[0])
"""Folders of the code between the engine and the user's code."""

TORCH = torch.__path__[0]


def release_frames(error: BaseException) -> None:
    """Drop the variables of an interrupted cell's frames, so that a DataLoader's workers end.

    IPython keeps the last traceback, and with it the variables and loops of each frame.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            len(frame.f_locals)  # reading it renews Python 3.11's copy, which is then empty


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one that was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__context__


def failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception that has just been caught, for the notebook."""
    formatted = vars(error).pop(RENDERS_ITSELF, None)
    return Failure(
        rank=engine.group.rank,
        name=type(error).__name__,
        text=text_of(error),
        traceback=tuple(formatted() if formatted else traceback_of(error, engine)),
        failed_at=time.time(),
        line=line_of(error),
        is_consequence=is_consequence(error),
        was_waiting=not isinstance(error, RunCancelledError),
        breaks_group=isinstance(error, CollectiveMismatchError),
    )


def line_of(error: BaseException) -> int:
    """Return the line that the cell or the script was in; 0 if neither was.

    A function of another cell is not looked into.
    """
    found = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame) and line is not None
    ]
    return [line for file, line in found if file == found[0][0]][-1] if found else 0


def text_of(error: BaseException) -> str:
    """Return an exception's message."""
    if isinstance(error, BdbQuit):
        return "the debugger was left with quit, which ends the cell; continue goes on with it"
    return said_by(error.msg if isinstance(error, SyntaxError) else error)


def said_by(error: object) -> str:
    """Return an exception as text, in Python's words where its own code for that fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the user's code
        return "<exception str() failed>"


def traceback_of(error: BaseException, engine: RankEngine) -> list[str]:
    """Return the formatted traceback, from the user's first line on."""
    shell, frames = engine.shell, users_part(error.__traceback__)
    if isinstance(error, CollectiveMismatchError | UserError):
        end_at_users(frames)
    in_code = any(is_users(frame) for frame, _ in traceback.walk_tb(frames))
    if isinstance(error, BdbQuit) or (isinstance(error, UserError | SystemExit) and not in_code):
        return []  # its message is enough
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
    """Return whether Python's own traceback is shown in place of IPython's.

    IPython's takes long, and many ranks fail at once by an interrupt or as a consequence of one
    rank.  It fails where a frame has no line, as between two instructions.
    """
    if isinstance(error, KeyboardInterrupt) or is_consequence(error):
        return True
    frames = (each for link in chain_of(error) for each in traceback.walk_tb(link.__traceback__))
    return any(line is None for _, line in frames)


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame on; None if it has no frame of theirs."""
    frames = _past(frames, NOT_THE_USERS)
    # Torch may call the user's forward; otherwise the traceback shows torch's own frames.
    return _past(frames, (*NOT_THE_USERS, TORCH)) or frames


def _past(frames: TracebackType | None, folders: tuple[str, ...]) -> TracebackType | None:
    while frames and frames.tb_frame.f_code.co_filename.startswith(folders):
        frames = frames.tb_next
    return frames


def end_at_users(frames: TracebackType | None) -> None:
    """Cut the traceback off after the user's innermost line, if one is in a cell."""
    last = None
    while frames is not None:
        last = frames if is_users(frames.tb_frame) else last
        frames = frames.tb_next
    if last is not None:
        last.tb_next = None


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception only reports that another rank has gone or failed."""
    if isinstance(error, ConsequenceError):
        return True
    text = said_by(error)
    is_lost = isinstance(error, RuntimeError) and torch_internals.reports_lost_peer(error, text)
    return is_lost or f"running the callback: {ConsequenceError.__name__}: " in text  # of a future
