"""Where on the stack is the user's code?  (ranks)"""

import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Final

import torch

CELLS = f"{os.sep}ipykernel_"
"""A part of the file name of every cell's code."""
BACKWARD = torch.autograd.backward.__code__.co_filename
"""The file of torch that computes gradients."""
MAX_FRAMES: Final = 60
"""How far up the stack to look for the user's line."""

_users_file = CELLS


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_line() -> str:
    """Return the user's innermost line: ``"line 3 of train.py, backward"``; empty if none is near.

    In a cell it is ``"line 3"``.  The backward pass may lie between that line and the caller.
    """
    in_backward = False
    for frame in islice(outward(sys._getframe(2)), MAX_FRAMES):
        file = frame.f_code.co_filename
        if _users_file in file:
            script = "" if _users_file == CELLS else f" of {os.path.basename(file)}"
            return f"line {frame.f_lineno}{script}{', backward' if in_backward else ''}"
        in_backward = in_backward or file == BACKWARD
    return ""


@contextlib.contextmanager
def lines_of(path: str) -> Iterator[None]:
    """Return a context in which the user's lines are those of a script."""
    global _users_file
    _users_file = path
    try:
        yield
    finally:
        _users_file = CELLS
