"""The folders in which runs can be stored.  Runs in the kernel."""

import atexit
import os
import shutil
import sys
from pathlib import Path
from typing import TextIO

from ddpnb.protocol.processes import hold, private_folder, working_folder


def runs_folder(start: Path | None = None) -> Path:
    """Return the folder for stored runs.  The folder may not exist yet.

    The folder is ``data/runs`` in the project around ``start``.  A project is the nearest parent
    folder that contains ``data/`` and either ``pyproject.toml`` or ``notebooks/``.  Outside a
    project, the folder is ``data/runs`` in ``start``.

    Args:
        start: the first folder of the search; by default the working folder.
    """
    here = (start or working_folder()).resolve()
    project = next((folder for folder in (here, *here.parents) if _is_project(folder)), here)
    return project / "data" / "runs"


def _is_project(folder: Path) -> bool:
    is_marked = os.path.isfile(folder / "pyproject.toml") or os.path.isdir(folder / "notebooks")
    return is_marked and os.path.isdir(folder / "data")


def users_folder() -> Path:
    """Return the folder for runs of read-only projects, as XDG and macOS recommend."""
    home, given = Path(os.path.expanduser("~")), Path(os.environ.get("XDG_DATA_HOME", ""))
    default = home / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")
    return (given if given.is_absolute() else default) / "ddpnb" / "runs"


def temporary_folder() -> Path:
    """Create a folder that is removed when this kernel ends, or later if the kernel is killed."""
    folder = private_folder()
    atexit.register(_remove, folder, os.getpid(), hold(folder))
    return folder


def _remove(folder: Path, pid: int, _lock: TextIO) -> None:
    if os.getpid() == pid:  # not in a process forked from the kernel
        shutil.rmtree(folder, ignore_errors=True)
