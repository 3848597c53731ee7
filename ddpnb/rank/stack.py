"""Finds the frames of the user's code on the call stack.  Runs on the ranks."""

import os
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

CELL_NUMBERS: dict[str, int] = {}
"""Maps the file name that IPython gives to the code of a cell to the ``n`` of ``In [n]``."""
BACKWARD = torch.autograd.backward.__code__.co_filename
"""Path of the torch file that starts a backward pass."""
OWN_FOLDER = str(Path(__file__).parents[1])
MAX_FRAMES: Final = 60
"""Maximum number of frames in which ``users_line`` looks for the user's code."""


def linked(first: Any, attribute: str) -> Iterator[Any]:
    """Yield an object, then the object in its attribute, and so on until the attribute is None.

    ``f_back`` links frames, ``tb_next`` links a traceback, and ``__context__`` links errors.
    """
    while first is not None:
        yield first
        first = getattr(first, attribute)


def is_users(frame: FrameType) -> bool:
    """Return True if a frame runs the user's code: a cell or a script in the module ``__main__``.

    ipyparallel's own call and the fork server's first module also have the name ``__main__``, but
    they are not the user's code.
    """
    if frame.f_globals.get("__name__") != "__main__":
        return False
    path = frame.f_code.co_filename
    return path != "<string>" and not path.startswith(OWN_FOLDER)


def with_cell_names(text: str) -> str:
    """Return lines of a traceback with ``Cell In[3]`` instead of a cell's temporary file name."""

    def name(file: re.Match[str]) -> str:
        return f"{file[1]}Cell In[{CELL_NUMBERS[file[2]]}]" if file[2] in CELL_NUMBERS else file[0]

    return re.sub(r'File (\x1b\[[\d;]*m|)"([^"]+)"', name, text)


def users_line() -> str:
    """Return the innermost line of the user's code, such as ``"line 3 of train.py, backward"``.

    Return an empty string if none of the innermost ``MAX_FRAMES`` frames runs the user's code.
    """
    in_backward = False
    for frame in islice(linked(sys._getframe(2), "f_back"), MAX_FRAMES):
        file = frame.f_code.co_filename
        if is_users(frame):
            script = "" if file in CELL_NUMBERS else f" of {os.path.basename(file)}"
            return f"line {frame.f_lineno}{script}{', backward' if in_backward else ''}"
        in_backward = in_backward or file == BACKWARD
    return ""
