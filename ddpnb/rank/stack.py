"""Where on the stack is the user's code?  (ranks)"""

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Final

import torch

CELLS = f"{os.sep}ipykernel_"
"""A part of the file name of every cell's code."""
BACKWARD = torch.autograd.backward.__code__.co_filename
"""The file of torch that computes gradients."""
OWN_FOLDER = str(Path(__file__).parents[1])
MAX_FRAMES: Final = 60
"""How far up the stack to look for the user's line."""


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs a cell or a script, whose module is ``__main__``.

    ipyparallel's own call runs in the cells' namespace too, and the fork server's first module is
    its process's ``__main__``.
    """
    if frame.f_globals.get("__name__") != "__main__":
        return False
    path = frame.f_code.co_filename
    return path != "<string>" and not path.startswith(OWN_FOLDER)


def users_place() -> tuple[int, bool]:
    """Return the user's innermost line, and whether the backward pass lies in between.

    The line is 0 if there is none near.
    """
    in_backward = False
    for frame in islice(outward(sys._getframe(2)), MAX_FRAMES):
        if is_users(frame):
            return frame.f_lineno, in_backward
        in_backward = in_backward or frame.f_code.co_filename == BACKWARD
    return 0, in_backward


def in_script() -> str:
    """Return the path of the script with the user's innermost line; empty: a cell has it."""
    for frame in filter(is_users, outward(sys._getframe(1))):
        path = frame.f_code.co_filename
        return "" if CELLS in path else path
    return ""
