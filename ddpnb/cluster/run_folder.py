"""Where do a cluster's files lie, and who removes them after a crash?  (Notebook side.)

A folder of the cluster's own, closed to other users, in memory where there is such a
place.  The fork server removes it.  Where that was killed too, the next notebook does.
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
    """Return where the folders of clusters lie."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def private_folder() -> Path:
    """Make a folder for a cluster, closed to other users (mode 0700)."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder()))
    write_owners(folder, [os.getpid()])
    return folder


def write_owners(folder: Path, pids: list[int]) -> None:
    """Note the processes that need the folder; as long as one lives, it is no leftover."""
    owners = [process_id(pid) for pid in pids]
    atomic_write(folder / OWNERS, json.dumps(owners).encode())


def living_owners(folder: Path) -> list[int]:
    """Return the processes that need the folder and live."""
    return [owner[0] for owner in json.loads((folder / OWNERS).read_text()) if is_alive(owner)]


def own_folders() -> list[Path]:
    """Return the folders of this user's clusters."""
    found = []
    for folder in parent_folder().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if folder.lstat().st_uid == os.getuid():
                found.append(folder)
    return found


def remove_leftovers() -> list[Path]:
    """Remove the folders of this user whose owners have all ended; return them."""
    removed = []
    for folder in own_folders():
        with contextlib.suppress(OSError, ValueError):
            if not living_owners(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed
