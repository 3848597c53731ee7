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
            locks = [folder / name for name in (KERNEL_LOCK, SERVER_LOCK)]
            found = [path for path in locks if path.exists()]  # none: they have yet to be locked
            if found and all(holder_of(path) is None for path in found):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed
