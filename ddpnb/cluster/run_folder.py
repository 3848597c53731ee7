"""The folder of a cluster's files, and who needs it (kernel).

Each cluster has one of its own, closed to other users, in memory where possible.  Its kernel and
its fork server each lock a file in it.  The fork server removes it, or else the next kernel once
neither holds its lock.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from ddpnb.protocol.processes import (
    KERNEL_LOCK,
    RUN_FOLDER,
    SERVER_LOCK,
    holder_of,
    parent_folder,
)


def private_folder() -> Path:
    """Make a folder for a cluster, closed to other users (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=parent_folder()))


def is_needed(folder: Path) -> bool:
    """Return whether a process holds the folder, or has yet to lock it."""
    locks = [path for name in (KERNEL_LOCK, SERVER_LOCK) if (path := folder / name).exists()]
    return not locks or any(holder_of(path) is not None for path in locks)


def own_folders() -> list[Path]:
    """Return this user's run folders."""
    found = []
    for folder in parent_folder().glob(f"{RUN_FOLDER}*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if folder.lstat().st_uid == os.getuid():
                found.append(folder)
    return found


def remove_leftovers() -> list[Path]:
    """Remove and return this user's run folders that no living process needs."""
    removed = []
    for folder in own_folders():
        with contextlib.suppress(OSError, ValueError):
            if not is_needed(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed
