"""Processes in other surroundings: read-only or missing folders, small limits, another user."""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

OTHER_USER = 4242
"""A user id without an entry in /etc/passwd, as on OpenShift."""
SHM = {
    "usual": "",
    "read-only": "mount -t tmpfs -o ro none /dev/shm",
    "small": "mount -t tmpfs -o size=64m,mode=1777 none /dev/shm",
    "absent": """
        mkdir {folder}/dev; mount --bind /dev {folder}/dev; mount -t tmpfs -o mode=755 none /dev
        for name in null zero random urandom; do
            touch /dev/$name; mount --bind {folder}/dev/$name /dev/$name
        done
        ln -s /proc/self/fd /dev/fd""",
}
"""For each state of /dev/shm, the commands that make it."""


@functools.cache
def missing_right() -> str:
    """Return the reason why this machine cannot change the surroundings; empty if it can."""
    if os.getuid() != 0:
        return "only root can mount folders and change the user"
    words = ["unshare", "-m", "setpriv", "--reuid", str(OTHER_USER), "true"]
    if not all(map(shutil.which, ("unshare", "setpriv"))):
        return "unshare and setpriv are not installed"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr.strip()


def inside(
    folder: Path, *, read_only: list[Path], shm: str = "usual", user: int = 0, limits: str = ""
) -> list[str]:
    """Return the first words of a command that runs a program in other surroundings.

    Mounts are visible only to the program.  ``folder`` is for mount points.  A user other than root
    can read all files, because Python may be in root's home, but can write only where users can.
    """
    if reason := missing_right():
        pytest.skip(reason)
    lines = ["set -e", SHM[shm].format(folder=folder)]
    lines += [f"mount --bind {p} {p}; mount -o remount,bind,ro {p}" for p in read_only]
    ids = f"--reuid {user} --regid {user} --clear-groups" if user else ""
    caps = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search" if user else ""
    lines += [limits, f'exec setpriv {ids} {caps} "$@"']
    return ["unshare", "-m", "bash", "-c", "\n".join(lines), "inside"]
