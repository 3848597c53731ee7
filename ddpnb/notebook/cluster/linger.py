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

from ddpnb.errors import UserError
from ddpnb.notebook.cluster.folder import (
    PREFIX,
    Owner,
    is_alive,
    living_owners,
    own_folders,
    write_json,
)
from ddpnb.notebook.cluster.plan import ClusterSpec, Plan
from ddpnb.wire import RankState

SAVED = "cluster.json"
DOOR = "kernel.sock"
"""Where the fork server awaits another kernel."""

HOW_TO_LINGER = "ranks outlive their kernel where they were started with %ddp_start --linger 600"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What another kernel must know of a cluster to use it."""

    folder: Path
    """The run folder."""
    home: Path
    """Where the notebook lies that started it, and where cells run."""
    began: float
    """``time.time()`` when it was started."""
    server: Owner
    """The fork server."""
    spec: ClusterSpec
    method: str
    plan: Plan
    master_port: int
    states: tuple[RankState, ...]
    engine_of: dict[int, int]
    """Each rank's engine."""
    generation: int
    """Of the process group."""
    group_is_cut: bool
    group_is_checked: bool

    @property
    def name(self) -> str:
        """What it is called by."""
        return name_of(self.folder)

    def write(self) -> None:
        """Write it into the run folder, in place of what was true before."""
        content = asdict(self) | {"folder": str(self.folder), "home": str(self.home)}
        write_json(self.folder / SAVED, content)


def name_of(folder: Path) -> str:
    """Return what the cluster of a run folder is called by."""
    return folder.name.removeprefix(PREFIX)


def read(folder: Path) -> Saved:
    """Read what was written last; raises what ``json`` and the dataclasses raise."""
    content: dict[str, Any] = json.loads((folder / SAVED).read_text())
    plan = content["plan"]
    content |= {
        "folder": folder,
        "home": Path(content["home"]),
        "server": tuple(content["server"]),
        "spec": ClusterSpec(**content["spec"]),
        "plan": Plan(**plan | {"devices": tuple(plan["devices"])}),
        "states": tuple(
            RankState(**state | {"missing": tuple(state.get("missing", ()))})
            for state in content["states"]
        ),
        "engine_of": {int(rank): engine for rank, engine in content["engine_of"].items()},
    }
    return Saved(**content)


def lingering() -> list[Saved]:
    """Return this user's clusters that outlive their kernels, held or not, oldest first."""
    found = []
    for folder in own_folders():
        # Half-made, just ended, or another version's: nothing to attach to.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, UserError):
            saved = read(folder)
            if saved.spec.linger_seconds and is_alive(saved.server):
                found.append(saved)
    return sorted(found, key=lambda saved: saved.began)


def holder(saved: Saved) -> int | None:
    """Return the process id of the kernel that holds a cluster, if one does."""
    with contextlib.suppress(OSError, ValueError):
        return next((pid for pid in living_owners(saved.folder) if pid != saved.server[0]), None)
    return None


def find(name: str, here: Path) -> Saved:
    """Return the cluster to attach to.

    Args:
        name: of the cluster; empty for the one that waits, or the one of them that was
            started in ``here``.
        here: where the notebook lies.

    Raises:
        UserError: where there is none, or more than one.
    """
    waiting: list[Saved] = []
    held: dict[str, int] = {}
    for saved in lingering():
        if (kernel := holder(saved)) is None:
            waiting.append(saved)
        else:
            held[saved.name] = kernel
    return choose(waiting, held, name, here)


def waits(here: Path) -> bool:
    """Tell whether a cluster that was started in ``here`` waits for a kernel."""
    return any(saved.home == here and holder(saved) is None for saved in lingering())


def choose(waiting: Sequence[Saved], held: dict[str, int], name: str, here: Path) -> Saved:
    """Return the cluster to attach to; see ``find``.

    Args:
        waiting: the clusters that no kernel holds.
        held: the others' names, each with the process id of its kernel.
        name: as in ``find``.
        here: as in ``find``.
    """
    if name in held:
        raise is_held(name, held[name])
    matching = [saved for saved in waiting if name in ("", saved.name)]
    started_here = [saved for saved in matching if saved.home == here]
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
        names = ", ".join(saved.name for saved in waiting)
        raise UserError(f"There is no cluster {name!r} to attach to; choose one of: {names}.")
    raise UserError(
        f"There is no cluster {name + ' ' if name else ''}to attach to: {HOW_TO_LINGER}."
    )


def is_held(name: str, kernel: int | None) -> UserError:
    """Return the error for a cluster that another kernel holds."""
    whose = "another kernel" if kernel is None else f"another kernel, process {kernel}"
    return UserError(
        f"The cluster {name} is in use by {whose}: shut that kernel down, then attach again."
    )


def described(saved: Saved) -> str:
    """Tell a cluster from others: name, ranks, where and when it was started."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved.began))
    num_ranks = len(saved.states)
    return f"{saved.name} ({num_ranks} ranks, started {began} in {saved.home})"
