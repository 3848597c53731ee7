"""The folder of a cluster's files, and who needs it (kernel).

Each cluster has one of its own, closed to other users, in memory where possible.  Its fork server
locks a file in it, and removes it; where that was killed, the next kernel does.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from ddpnb.protocol.processes import RUN_FOLDER, SERVER_LOCK, is_held, parent_folder


def private_folder() -> Path:
    """Make a folder for a cluster, closed to other users (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=parent_folder()))


def remove_leftovers() -> list[Path]:
    """Remove and return this user's run folders that no living fork server needs."""
    removed = []
    for folder in parent_folder().glob(f"{RUN_FOLDER}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, or yet to be locked
            if folder.lstat().st_uid == os.getuid() and not is_held(folder / SERVER_LOCK):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed
