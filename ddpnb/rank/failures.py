"""Exceptions on this rank, as the notebook shows them (ranks)."""

import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import IPython
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Failure
from ddpnb.rank.collective_checks import CollectiveMismatchError
from ddpnb.rank.comm.rendezvous import RankLostError, RunCancelledError
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.status import is_users

CLOSED_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|NCCL communicator was aborted"
    r"|remote process exiting prematurely"
)
"""Errors of gloo and NCCL when a peer has gone, or when this rank was aborted."""

FINGERPRINT = re.compile(
    r"[Rr]ank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, "
    r"OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]), TensorDtypes=(\w+))?"
)
"""Torch's description of each rank's call if the calls of a checked group do not match."""

CALLS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "ALLTOALL": "all_to_all"}
"""Calls that torch spells differently in that description."""

NOT_THE_USERS = (str(Path(__file__).parents[1]), IPython.__path__[0])
"""Folders of the code between the engine and the user's code."""

TORCH = torch.__path__[0]


def failure_of(error: BaseException, engine: RankEngine) -> Failure:
    """Describe an exception that has just been caught, for the notebook."""
    return Failure(
        rank=engine.group.rank,
        name=type(error).__name__,
        text=text_of(error),
        traceback=tuple(traceback_of(error, engine)),
        failed_at=time.time(),
        is_consequence=is_consequence(error),
        was_waiting=not isinstance(error, RunCancelledError),
        breaks_group=isinstance(error, CollectiveMismatchError),
    )


def text_of(error: BaseException) -> str:
    """Return an exception's message; one short sentence if calls of ranks do not match."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    ranks = FINGERPRINT.findall(text)
    if len(ranks) < 2:
        return text
    calls = [f"rank {rank} calls {_call(*call)}" for rank, *call in ranks]
    return f"the calls of the ranks do not match: {', but '.join(calls)}"


def _call(name: str, shape: str, dtype: str) -> str:
    call = CALLS.get(name, name.lower())
    return f"{call} with {dtype} {shape}" if shape else call


def traceback_of(error: BaseException, engine: RankEngine) -> list[str]:
    """Return the formatted traceback, from the user's first line on."""
    shell, frames = engine.kernel.shell, users_part(error.__traceback__)
    if isinstance(error, CollectiveMismatchError) and frames is not None:
        end_at_users(frames, shell)
    if isinstance(error, UserError) and frames is None:
        return []  # its message is enough
    if isinstance(error, SyntaxError) and frames is None:
        lines: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, [])
    else:
        lines = shell.InteractiveTB.structured_traceback(
            type(error), error, frames or error.__traceback__, tb_offset=0
        )
    return lines


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame on; None if it has no frame of theirs."""
    frames = _past(frames, NOT_THE_USERS)
    # Torch may call the user's forward; otherwise the traceback shows torch's own frames.
    return _past(frames, (*NOT_THE_USERS, TORCH)) or frames


def _past(frames: TracebackType | None, folders: tuple[str, ...]) -> TracebackType | None:
    while frames and frames.tb_frame.f_code.co_filename.startswith(folders):
        frames = frames.tb_next
    return frames


def end_at_users(frames: TracebackType, shell: Any) -> None:
    """Cut the traceback off after the user's innermost line, if one is in a cell."""
    frame: TracebackType | None = frames
    last = None
    while frame is not None:
        last = frame if is_users(frame.tb_frame, shell) else last
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception only reports that another rank has gone or failed."""
    if isinstance(error, RankLostError | RunCancelledError):
        return True
    return isinstance(error, RuntimeError) and CLOSED_CONNECTION.search(str(error)) is not None
