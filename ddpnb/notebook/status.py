"""What is every rank doing?  (Notebook side.)"""

import time
from collections.abc import Sequence
from typing import Protocol

import psutil

from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.diagnosis import describe
from ddpnb.notebook.cluster.exits import describe_exit
from ddpnb.notebook.show.table import Cell, Column, Table
from ddpnb.notebook.show.words import counted
from ddpnb.wire import Whereabouts

ANSWER_SECONDS = 3.0
"""How long a rank may take to say where it is; one that is stopped does not."""


class Running(Protocol):
    """Something that keeps ranks busy: a cell, a comparison."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that it keeps busy."""


def status_table(cluster: Cluster, running: Sequence[Running], notes: Sequence[str] = ()) -> Table:
    """Return one row per rank: where it lives, and whether it is idle, busy or gone.

    Args:
        cluster: whose ranks.
        running: what was started on them in the background.
        notes: what else is to be told.
    """
    busy = {rank for each in running if not each.done for rank in each.ranks}
    rows = []
    for state in cluster.states:
        exit_ = cluster.exits.get(str(state.rank))
        doing = describe_exit(exit_) if exit_ else "busy" if state.rank in busy else "idle"
        doing = doing if state.rank in cluster.living or exit_ else "gone"
        rows.append(
            (
                Cell(text=str(state.rank)),
                Cell(text=str(state.pid)),
                Cell(text=state.device, quiet=state.device_name),
                Cell(text=str(state.num_threads)),
                Cell(text=state.backend),
                Cell(text=doing),
            )
        )
    lost = cluster.lost
    return Table(
        caption=f"{counted(len(cluster.living), 'rank')} of {len(cluster.states)} alive",
        columns=(
            Column(title="rank"),
            Column(title="pid", is_number=True),
            Column(title="device"),
            Column(title="threads", is_number=True),
            Column(title="backend"),
            Column(title="state"),
        ),
        rows=tuple(rows),
        notes=(*((f"{lost}: start anew with %ddp_restart",) if lost else ()), *notes),
    )


def tell_where(cluster: Cluster) -> str:
    """Say where each rank stands at this moment, and give the stacks of those that are busy."""
    asked = {
        rank: [cluster.processes.order(rank, order) for order in ("where", "stack")]
        for rank in cluster.living
    }
    deadline = time.monotonic() + ANSWER_SECONDS
    told = []
    for rank in cluster.ranks:
        if rank not in asked:
            told.append(f"rank {rank} is dead")
            continue
        try:
            where, stack = (a.result(max(0.0, deadline - time.monotonic())) for a in asked[rank])
        except TimeoutError:
            told.append(f"rank {rank} does not answer: {state_of(cluster.states[rank].pid)}")
            continue
        told.append(describe(Whereabouts(**where)))
        told += ["".join(stack)] if where["is_busy"] else []
    return "\n".join(told)


def state_of(pid: int) -> str:
    """Say what the operating system says of a process: ``"stopped"``, ``"running"``."""
    try:
        return f"its process is {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return "its process is gone"
