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

import psutil

PREFIX = "ddpnb-"
OWNERS = "owners.json"

Owner = tuple[int, float]
"""A process: its id, and when it began, since ids are used again."""


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
    owners = [(pid, psutil.Process(pid).create_time()) for pid in pids]
    draft = folder / f"{OWNERS}.new"
    draft.write_text(json.dumps(owners))
    draft.rename(folder / OWNERS)


def remove_leftovers() -> list[Path]:
    """Remove the folders of this user whose owners have all ended; return them."""
    removed = []
    for folder in parent_folder().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            owners = json.loads((folder / OWNERS).read_text())
            if folder.stat().st_uid == os.getuid() and not any(map(is_alive, owners)):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def is_alive(owner: Owner) -> bool:
    """Tell whether a process still runs."""
    pid, began = owner
    try:
        process = psutil.Process(pid)
        is_the_same = bool(process.create_time() == began)
        return is_the_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
