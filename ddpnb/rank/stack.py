"""Where on the stack is the user's code?  (ranks)"""

import contextlib
import os
import sys
import zlib
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Final

import torch

CELLS = f"{os.sep}ipykernel_"
"""A part of the file name of every cell's code."""
BACKWARD = torch.autograd.backward.__code__.co_filename
"""The file of torch that computes gradients."""
MARK: Final = 2**24
"""Lines are smaller; above them is the mark of the file."""
MAX_FRAMES: Final = 60
"""How far up the stack to look for the user's line."""

_users_file = CELLS
_users_mark = 0


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_place() -> tuple[int, bool]:
    """Return the user's innermost line, and whether the backward pass lies in between.

    The line is 0 if there is none near; in a script the mark of its file is added.
    """
    in_backward = False
    for frame in islice(outward(sys._getframe(2)), MAX_FRAMES):
        file = frame.f_code.co_filename
        if _users_file in file:
            return frame.f_lineno + _users_mark, in_backward
        in_backward = in_backward or file == BACKWARD
    return 0, in_backward


@contextlib.contextmanager
def lines_of(path: str) -> Iterator[None]:
    """Return a context in which the user's lines are those of a script."""
    global _users_file, _users_mark
    _users_file, _users_mark = path, 0 if path == CELLS else mark_of(path)
    try:
        yield
    finally:
        _users_file, _users_mark = CELLS, 0


def in_script() -> str:
    """Return the path of the script with the user's lines; empty: a cell has them."""
    return _users_file if _users_mark else ""


def mark_of(path: str) -> int:
    """Return what is added to the lines of a script, so that other files' lines differ."""
    return (1 + zlib.crc32(path.encode()) % 255) * MARK
