"""How does an exception on this rank read in the notebook?  (Rank side.)"""

import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import IPython
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Failure
from ddpnb.rank.cancellation import RunCancelledError
from ddpnb.rank.collective_checks import CollectiveMismatchError
from ddpnb.rank.comm.messages import RankLostError
from ddpnb.rank.engine import RankEngine
from ddpnb.rank.status import is_users

CLOSED_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|NCCL communicator was aborted"
    r"|remote process exiting prematurely"
)
"""What gloo and NCCL say on a rank whose peer has gone, or that was itself cut off."""

FINGERPRINT = re.compile(
    r"[Rr]ank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, "
    r"OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]), TensorDtypes=(\w+))?"
)
"""What torch says of each rank where the calls of a checked group do not match."""

CALLS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "ALLTOALL": "all_to_all"}
"""Calls that torch spells in another way there."""

NOT_THE_USERS = (str(Path(__file__).parents[1]), IPython.__path__[0])
"""Where the code lies that stands between the engine and what the user wrote."""


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
    """Return what an exception says; where calls of ranks do not match, in one short sentence."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    ranks = FINGERPRINT.findall(text)
    if len(ranks) < 2:
        return text
    told = [f"rank {rank} calls {_call(*call)}" for rank, *call in ranks]
    return f"the calls of the ranks do not match: {', but '.join(told)}"


def _call(name: str, shape: str, dtype: str) -> str:
    told = CALLS.get(name, name.lower())
    return f"{told} with {dtype} {shape}" if shape else told


def traceback_of(error: BaseException, engine: RankEngine) -> list[str]:
    """Return the formatted traceback, from the user's first line on."""
    shell, frames = engine.kernel.shell, users_part(error.__traceback__)
    if isinstance(error, CollectiveMismatchError) and frames is not None:
        end_at_users(frames, shell)
    if isinstance(error, UserError) and frames is None:
        return []  # its sentence says it all
    if isinstance(error, SyntaxError) and frames is None:
        lines: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, [])
    else:
        lines = shell.InteractiveTB.structured_traceback(
            type(error), error, frames or error.__traceback__, tb_offset=0
        )
    return lines


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame on; None where it has none of theirs."""
    frames = _past(frames, NOT_THE_USERS)
    # Torch calls the user's forward; where nothing of theirs follows, its own frames are told.
    return _past(frames, (*NOT_THE_USERS, TORCH)) or frames


def _past(frames: TracebackType | None, places: tuple[str, ...]) -> TracebackType | None:
    while frames and frames.tb_frame.f_code.co_filename.startswith(places):
        frames = frames.tb_next
    return frames


def end_at_users(frames: TracebackType, shell: Any) -> None:
    """Cut off what the user's innermost line has called, where one is in a cell."""
    frame: TracebackType | None = frames
    last = None
    while frame is not None:
        last = frame if is_users(frame.tb_frame, shell) else last
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


def is_consequence(error: BaseException) -> bool:
    """Tell whether an exception says only that another rank is gone, or has failed."""
    if isinstance(error, RankLostError | RunCancelledError):
        return True
    return isinstance(error, RuntimeError) and CLOSED_CONNECTION.search(str(error)) is not None
