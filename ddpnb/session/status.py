"""What is every rank doing?  (Notebook side.)"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.detach import name_of
from ddpnb.cluster.hangs import describe
from ddpnb.cluster.processes import describe_exit
from ddpnb.cluster.stopped import describe_stopped, stopped_ranks
from ddpnb.protocol.messages import RankStatus
from ddpnb.protocol.processes import RankCommand
from ddpnb.protocol.rank_sets import format_ranks
from ddpnb.reports.formatting import counted
from ddpnb.reports.table import Cell, Column, Table

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
    stopped = stopped_ranks(cluster, cluster.ranks)
    rows = []
    for state in cluster.states:
        exit_ = cluster.exits.get(state.rank)
        doing = describe_exit(exit_) if exit_ else "busy" if state.rank in busy else "idle"
        doing = "stopped" if state.rank in stopped else doing
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
    told = [describe_stopped(cluster, stopped)] if stopped else []
    if cluster.lost:
        told.append(f"{cluster.lost}: start anew with %ddp_restart")
    told.extend(notes)
    return Table(
        caption=f"{counted(len(cluster.living), 'rank')} of {len(cluster.states)} alive",
        columns=(
            Column(title="rank"),
            Column(title="pid", is_number=True),
            Column(title="device"),
            Column(title="threads", is_number=True),
            Column(title="backend"),
            Column(title="state", is_prose=True),
        ),
        rows=tuple(rows),
        notes=tuple(told),
    )


def tell_where(cluster: Cluster) -> str:
    """Say where each rank stands at this moment, and give the stacks of those that are busy."""
    asked = {
        rank: [
            cluster.processes.command(rank, order)
            for order in (RankCommand.STATUS, RankCommand.STACK)
        ]
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
            is_stopped = stopped_ranks(cluster, [rank])
            told.append(describe_stopped(cluster, [rank]) if is_stopped else no_answer(rank))
            continue
        told.append(describe(RankStatus(**where)))
        told += ["".join(stack)] if where["is_busy"] else []
    return "\n".join(told)


def no_answer(rank: int) -> str:
    """Say that a rank lives and does not tell where it is."""
    return f"rank {rank} does not answer: it may be deep in code that lets no other thread run"


def tell_running(cluster: Cluster, num_ranks: int | None) -> str:
    """Say what becomes of the wish to start ranks where some run already.

    Args:
        cluster: that runs.
        num_ranks: as many were wished for; None for no wish.
    """
    if dead := cluster.dead:
        return (
            f"A cluster is running already, but rank {format_ranks(dead)} of it is dead: "
            "%ddp_restart brings the ranks back."
        )
    if num_ranks not in (None, len(cluster.ranks)):
        return (
            f"A cluster of {len(cluster.ranks)} ranks is running already: "
            f"%ddp_restart -n {num_ranks} changes that."
        )
    ranks = format_ranks(cluster.ranks)
    return f"The cluster is running already, with ranks {ranks}: it is used as it is."


def with_notes(table: Table, cluster: Cluster) -> Table:
    """Return a table with what is off in a cluster, and whether it outlives the kernel."""
    if cluster.lost is not None:
        return table
    notes = list(cluster.missing)
    if cluster.spec.detach_seconds:
        notes.append(
            f"outlives the kernel by {cluster.spec.detach_seconds:g} s: "
            f"%ddp_start --attach finds it again ({name_of(cluster.folder)})"
        )
    return replace(table, notes=(*table.notes, *notes))
