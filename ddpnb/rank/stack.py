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


def users_place() -> tuple[int, bool]:
    """Return the user's innermost line, and whether the backward pass lies in between.

    The line is 0 if there is none near.
    """
    in_backward = False
    for frame in islice(outward(sys._getframe(2)), MAX_FRAMES):
        file = frame.f_code.co_filename
        if _users_file in file:
            return frame.f_lineno, in_backward
        in_backward = in_backward or file == BACKWARD
    return 0, in_backward


@contextlib.contextmanager
def lines_of(path: str) -> Iterator[None]:
    """Return a context in which the user's lines are those of a script."""
    global _users_file
    _users_file = path
    try:
        yield
    finally:
        _users_file = CELLS


def in_script() -> str:
    """Return the path of the script with the user's lines; empty: a cell has them."""
    return "" if _users_file == CELLS else _users_file
