"""The folder of a cluster's files: who needs it, and the cluster's record (kernel).

Each cluster has one of its own, closed to other users, in memory where possible.  Its kernel and
its fork server each lock a file in it.  The fork server removes it, or else the next kernel once
neither holds its lock.  The record of a cluster that outlives its kernel is JSON.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpnb.cluster.placement import ClusterSpec, HostReport, Placement
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.processes import (
    KERNEL_LOCK,
    SERVER_LOCK,
    ProcessId,
    atomic_write,
    holder_of,
    is_alive,
)

PREFIX = "ddpnb-"
RECORD_FILE = "cluster.json"
SOCKET = "kernel.sock"
"""Where the fork server waits for another kernel."""


def parent_folder() -> Path:
    """Return the folder that holds the run folders."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def private_folder() -> Path:
    """Make a folder for a cluster, closed to other users (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder()))


def is_needed(folder: Path) -> bool:
    """Return whether a process holds the folder, or has yet to lock it."""
    locks = [path for name in (KERNEL_LOCK, SERVER_LOCK) if (path := folder / name).exists()]
    return not locks or any(holder_of(path) is not None for path in locks)


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
            if not is_needed(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


# -- clusters that outlive their kernel ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """All that another kernel needs to use a cluster."""

    folder: Path
    """The run folder."""
    home: Path
    """The folder of the notebook that started it, in which cells run."""
    began: float
    """``time.time()`` when it was started."""
    server: ProcessId
    """The fork server."""
    spec: ClusterSpec
    placement: Placement
    master_port: int
    states: tuple[RankState, ...]
    engine_of: dict[int, int]
    """The engine of each rank."""
    generation: int
    """The process group's number."""
    group_is_aborted: bool
    group_is_checked: bool
    hosts: dict[str, Any] = field(default_factory=dict)
    """Of several hosts: their spelling, their agents, what ranks find in the environment."""

    @property
    def name(self) -> str:
        """The cluster's name."""
        return name_of(self.folder)

    def write(self) -> None:
        """Write the record into the run folder, in place of the last one."""
        content = asdict(self) | {"folder": str(self.folder), "home": str(self.home)}
        atomic_write(self.folder / RECORD_FILE, json.dumps(content).encode())


def name_of(folder: Path) -> str:
    """Return the name of a run folder's cluster."""
    return folder.name.removeprefix(PREFIX)


def read(folder: Path) -> ClusterRecord:
    """Read a cluster's record.

    Raises:
        OSError: there is none: the cluster does not outlive its kernel, or has just ended.
        UserError: it is unreadable, or of another version of ddpnb.
    """
    path = folder / RECORD_FILE
    try:
        return _parse(folder, path.read_text())
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        server = holder_of(folder / SERVER_LOCK)
        raise UserError(
            f"{path} is damaged, or another version of ddpnb wrote it: its cluster cannot be "
            f"attached to; end it with `kill {server}` and start anew with %ddp_start."
        ) from error


def _parse(folder: Path, text: str) -> ClusterRecord:
    content: dict[str, Any] = json.loads(text)
    placement = content["placement"]
    content |= {
        "folder": folder,
        "home": Path(content["home"]),
        "server": tuple(content["server"]),
        "spec": ClusterSpec(**content["spec"]),
        "placement": Placement(
            **placement
            | {
                "devices": tuple(placement["devices"]),
                "hosts": tuple(HostReport(**host) for host in placement["hosts"]),
                "sizes": tuple(placement["sizes"]),
            }
        ),
        "states": tuple(
            RankState(**state | {"missing": tuple(state["missing"])}) for state in content["states"]
        ),
        "engine_of": {int(rank): engine for rank, engine in content["engine_of"].items()},
    }
    return ClusterRecord(**content)


def detached() -> list[ClusterRecord]:
    """Return this user's clusters that outlive their kernel, held or not, oldest first."""
    return _read_all()[0]


def _read_all() -> tuple[list[ClusterRecord], dict[str, UserError]]:
    """Return the clusters of ``detached``, and by name an error for each unreadable record."""
    found: list[ClusterRecord] = []
    unreadable: dict[str, UserError] = {}
    for folder in own_folders():
        with contextlib.suppress(OSError, ValueError):  # just starting, or just ended
            if holder_of(folder / SERVER_LOCK) is None:
                continue
            try:
                record = read(folder)
            except UserError as error:
                unreadable[name_of(folder)] = error
            else:
                if record.spec.detach_seconds and is_alive(record.server):
                    found.append(record)
    return sorted(found, key=lambda record: record.began), unreadable


def holder(record: ClusterRecord) -> int | None:
    """Return the process id of the kernel that holds a cluster, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        return holder_of(record.folder / KERNEL_LOCK)
    return None


def find(name: str, here: Path) -> ClusterRecord:
    """Return the cluster to attach to.

    ``name`` may be empty for the only one that waits, or the only one of these that was started
    in ``here``, the notebook's folder.

    Raises:
        UserError: there is none, or more than one, or its record is unreadable.
    """
    waiting: list[ClusterRecord] = []
    held: dict[str, int] = {}
    found, unreadable = _read_all()
    for record in found:
        if (kernel := holder(record)) is None:
            waiting.append(record)
        else:
            held[record.name] = kernel
    if name in unreadable:
        raise unreadable[name]
    if unreadable and not (name or waiting):
        raise next(iter(unreadable.values()))
    return choose(waiting, held, name, here)


def waits(here: Path) -> bool:
    """Return whether a cluster that was started in ``here`` waits for a kernel."""
    return any(record.home == here and holder(record) is None for record in detached())


def choose(
    waiting: Sequence[ClusterRecord], held: dict[str, int], name: str, here: Path
) -> ClusterRecord:
    """Return the cluster to attach to; see ``find``.

    ``waiting`` are the clusters that no kernel holds, ``held`` the names of the others, each with
    the process id of its kernel.
    """
    if name in held:
        raise held_error(name, held[name])
    matching = [record for record in waiting if name in ("", record.name)]
    started_here = [record for record in matching if record.home == here]
    for choice in (started_here, matching):
        if len(choice) == 1:
            return choice[0]
    if matching:
        raise UserError(
            f"{len(matching)} clusters wait for a kernel, choose one with %ddp_start --attach "
            f"NAME: {'; '.join(map(describe, matching))}."
        )
    if held and not name:
        raise held_error(*next(iter(held.items())))
    if waiting:
        names = ", ".join(record.name for record in waiting)
        raise UserError(f"There is no cluster {name!r} to attach to; choose one of: {names}.")
    raise UserError(
        f"There is no cluster {name + ' ' if name else ''}to attach to: ranks outlive their kernel "
        "if they were started with %ddp_start --detach 600."
    )


def held_error(name: str, kernel: int | None) -> UserError:
    """Return the error of attaching to a cluster that another kernel holds."""
    other = "another kernel" if kernel is None else f"another kernel, process {kernel}"
    return UserError(
        f"The cluster {name} is in use by {other}: shut that kernel down, then attach again."
    )


def describe(record: ClusterRecord) -> str:
    """Return a cluster's name, number of ranks, and when and where it was started."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    num_ranks = len(record.states)
    return f"{record.name} ({num_ranks} ranks, started {began} in {record.home})"
