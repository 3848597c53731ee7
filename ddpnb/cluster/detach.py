"""How does a kernel find ranks that have outlived another?  (Notebook side.)

What it must know of a cluster lies in the cluster's run folder, as JSON.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpnb.cluster.placement import ClusterSpec, Placement
from ddpnb.cluster.run_folder import PREFIX, living_owners, own_folders
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.processes import ProcessId, atomic_write, is_alive

SAVED = "cluster.json"
DOOR = "kernel.sock"
"""Where the fork server awaits another kernel."""

HOW_TO_DETACH = "ranks outlive their kernel where they were started with %ddp_start --detach 600"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """What another kernel must know of a cluster to use it."""

    folder: Path
    """The run folder."""
    home: Path
    """Where the notebook lies that started it, and where cells run."""
    began: float
    """``time.time()`` when it was started."""
    server: ProcessId
    """The fork server."""
    spec: ClusterSpec
    method: str
    placement: Placement
    master_port: int
    states: tuple[RankState, ...]
    engine_of: dict[int, int]
    """Each rank's engine."""
    generation: int
    """Of the process group."""
    group_is_aborted: bool
    group_is_checked: bool

    @property
    def name(self) -> str:
        """What it is called by."""
        return name_of(self.folder)

    def write(self) -> None:
        """Write it into the run folder, in place of what was true before."""
        content = asdict(self) | {"folder": str(self.folder), "home": str(self.home)}
        atomic_write(self.folder / SAVED, json.dumps(content).encode())


def name_of(folder: Path) -> str:
    """Return what the cluster of a run folder is called by."""
    return folder.name.removeprefix(PREFIX)


def read(folder: Path) -> ClusterRecord:
    """Read what was written last.

    Raises:
        OSError: there is nothing: no cluster that outlives its kernel, or it has just ended.
        UserError: it cannot be read; says which file, and what to do.
    """
    path = folder / SAVED
    try:
        return _parse(folder, path.read_text())
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        server = living_owners(folder)[-1]  # before it stands the kernel, if one holds it
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
        "placement": Placement(**placement | {"devices": tuple(placement["devices"])}),
        "states": tuple(
            RankState(**state | {"missing": tuple(state.get("missing", ()))})
            for state in content["states"]
        ),
        "engine_of": {int(rank): engine for rank, engine in content["engine_of"].items()},
    }
    return ClusterRecord(**content)


def detached() -> list[ClusterRecord]:
    """Return this user's clusters that outlive their kernels, held or not, oldest first."""
    return _read_all()[0]


def _read_all() -> tuple[list[ClusterRecord], dict[str, UserError]]:
    """Return this user's clusters that outlive their kernels, and by name why others cannot."""
    found: list[ClusterRecord] = []
    damaged: dict[str, UserError] = {}
    for folder in own_folders():
        with contextlib.suppress(OSError, ValueError):  # half-made, or it has just ended
            if not living_owners(folder):
                continue
            try:
                record = read(folder)
            except UserError as error:
                damaged[name_of(folder)] = error
            else:
                if record.spec.detach_seconds and is_alive(record.server):
                    found.append(record)
    return sorted(found, key=lambda record: record.began), damaged


def holder(record: ClusterRecord) -> int | None:
    """Return the process id of the kernel that holds a cluster, if one does."""
    with contextlib.suppress(OSError, ValueError):
        return next((pid for pid in living_owners(record.folder) if pid != record.server[0]), None)
    return None


def find(name: str, here: Path) -> ClusterRecord:
    """Return the cluster to attach to.

    Args:
        name: of the cluster; empty for the one that waits, or the one of them that was
            started in ``here``.
        here: where the notebook lies.

    Raises:
        UserError: where there is none, or more than one, or its file is damaged.
    """
    waiting: list[ClusterRecord] = []
    held: dict[str, int] = {}
    found, damaged = _read_all()
    for record in found:
        if (kernel := holder(record)) is None:
            waiting.append(record)
        else:
            held[record.name] = kernel
    if name in damaged:
        raise damaged[name]
    if damaged and not (name or waiting):
        raise next(iter(damaged.values()))
    return choose(waiting, held, name, here)


def waits(here: Path) -> bool:
    """Tell whether a cluster that was started in ``here`` waits for a kernel."""
    return any(record.home == here and holder(record) is None for record in detached())


def choose(
    waiting: Sequence[ClusterRecord], held: dict[str, int], name: str, here: Path
) -> ClusterRecord:
    """Return the cluster to attach to; see ``find``.

    Args:
        waiting: the clusters that no kernel holds.
        held: the others' names, each with the process id of its kernel.
        name: as in ``find``.
        here: as in ``find``.
    """
    if name in held:
        raise is_held(name, held[name])
    matching = [record for record in waiting if name in ("", record.name)]
    started_here = [record for record in matching if record.home == here]
    for choice in (started_here, matching):
        if len(choice) == 1:
            return choice[0]
    if matching:
        raise UserError(
            f"{len(matching)} clusters wait for a kernel, choose one with %ddp_start --attach "
            f"NAME: {'; '.join(map(described, matching))}."
        )
    if held and not name:
        raise is_held(*next(iter(held.items())))
    if waiting:
        names = ", ".join(record.name for record in waiting)
        raise UserError(f"There is no cluster {name!r} to attach to; choose one of: {names}.")
    raise UserError(
        f"There is no cluster {name + ' ' if name else ''}to attach to: {HOW_TO_DETACH}."
    )


def is_held(name: str, kernel: int | None) -> UserError:
    """Return the error for a cluster that another kernel holds."""
    whose = "another kernel" if kernel is None else f"another kernel, process {kernel}"
    return UserError(
        f"The cluster {name} is in use by {whose}: shut that kernel down, then attach again."
    )


def described(record: ClusterRecord) -> str:
    """Tell a cluster from others: name, ranks, where and when it was started."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    num_ranks = len(record.states)
    return f"{record.name} ({num_ranks} ranks, started {began} in {record.home})"
