"""The folder of a cluster's files, and its removal after a crash (kernel).

Each cluster has a folder of its own, closed to other users, in memory where possible.
The fork server removes it.  If that was killed too, the next kernel does.
"""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from ddpnb.protocol.processes import atomic_write, is_alive, process_id

PREFIX = "ddpnb-"
OWNERS = "owners.json"


def parent_folder() -> Path:
    """Return the folder that holds the run folders."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def private_folder() -> Path:
    """Make a folder for a cluster, closed to other users (mode 0700)."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder()))
    write_owners(folder, [os.getpid()])
    return folder


def write_owners(folder: Path, pids: list[int]) -> None:
    """Note the processes that need the folder; it is a leftover once all have ended."""
    owners = [process_id(pid) for pid in pids]
    atomic_write(folder / OWNERS, json.dumps(owners).encode())


def living_owners(folder: Path) -> list[int]:
    """Return the living processes that need the folder."""
    return [owner[0] for owner in json.loads((folder / OWNERS).read_text()) if is_alive(owner)]


def own_folders() -> list[Path]:
    """Return this user's run folders."""
    found = []
    for folder in parent_folder().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if folder.lstat().st_uid == os.getuid():
                found.append(folder)
    return found


def remove_leftovers() -> list[Path]:
    """Remove and return this user's run folders that no living process needs."""
    removed = []
    for folder in own_folders():
        with contextlib.suppress(OSError, ValueError):
            if not living_owners(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed
