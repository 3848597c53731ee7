"""What every rank is doing, as a table and in sentences (kernel)."""

import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import describe
from ddpnb.cluster.monitor import describe_silent, describe_stopped, stopped_ranks
from ddpnb.cluster.placement import MAX_RANKS_PER_CORE, ClusterSpec
from ddpnb.cluster.wording import remedy, say
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankStatus
from ddpnb.protocol.processes import RankCommand, num_cores
from ddpnb.reports.formatting import counted
from ddpnb.reports.table import Cell, Column, Table, table_row

ANSWER_SECONDS = 3.0
"""How long a rank may take to report its position; a stopped process never does."""


def status_table(cluster: Cluster, busy: Collection[int], notes: Sequence[str] = ()) -> Table:
    """Return one row per rank: process, device, and whether it is idle, busy or gone.

    Background work keeps the ``busy`` ranks busy; ``notes`` are further lines under the table.
    """
    stopped = stopped_ranks(cluster, cluster.ranks)
    rows = []
    for state in cluster.states:
        exit_ = cluster.exits.get(state.rank)
        doing = str(exit_) if exit_ else "busy" if state.rank in busy else "idle"
        doing = "stopped" if state.rank in stopped else doing
        doing = doing if state.rank in cluster.living or exit_ else "gone"
        rows.append(
            table_row(
                state.rank,
                *([state.host] if not cluster.is_local else []),
                *(state.pid, Cell(text=state.device, quiet=state.device_name)),
                *(state.num_threads, state.backend, doing),
            )
        )
    all_notes = [describe_stopped(cluster, stopped)] if stopped else []
    if cluster.lost:
        all_notes.append(f"{cluster.lost}: %ddp_restart starts new ranks")
    all_notes.extend(notes)
    return Table(
        caption=f"{counted(len(cluster.living), 'rank')} of {len(cluster.states)} alive",
        columns=(
            Column(title="rank"),
            *([Column(title="host")] if not cluster.is_local else []),
            Column(title="pid", is_number=True),
            Column(title="device"),
            Column(title="threads", is_number=True),
            Column(title="backend"),
            Column(title="state", is_prose=True),
        ),
        rows=tuple(rows),
        notes=tuple(all_notes),
    )


def describe_ranks(cluster: Cluster) -> str:
    """Say where each rank is at this moment, with the stacks of those that are busy."""
    asked = {
        rank: [
            cluster.processes.command(rank, command)
            for command in (RankCommand.STATUS, RankCommand.STACK)
        ]
        for rank in cluster.living
    }
    deadline = time.monotonic() + ANSWER_SECONDS
    lines = []
    for rank in cluster.ranks:
        if rank not in asked:
            lines.append(f"rank {rank} is dead")
            continue
        try:
            where, stack = (a.result(max(0.0, deadline - time.monotonic())) for a in asked[rank])
        except TimeoutError:
            is_stopped = stopped_ranks(cluster, [rank])
            lines.append(
                describe_stopped(cluster, [rank]) if is_stopped else describe_silent([rank])
            )
            continue
        except RuntimeError as error:
            lines.append(f"rank {rank} cannot say where it is: {error}")
            continue
        lines.append(describe(RankStatus(**where)))
        lines += ["".join(stack)] if where["is_busy"] else []
    return "\n".join(lines)


def describe_running(cluster: Cluster, asked: ClusterSpec) -> str:
    """Say why no ranks are started as asked: a cluster is already running.

    Raises:
        UserError: others are asked for, on other hosts.
    """
    running = f"A cluster of {counted(len(cluster.ranks), 'rank')} is already running"
    for name in ("hosts", "engines", "profile"):
        wanted = getattr(asked, name, "")
        if wanted not in ("", getattr(cluster.spec, name, "")):
            option = f"--{name} {wanted}"
            raise UserError(f"{running}: %ddp_stop ends it, then {option} starts another.")
    if cluster.dead:
        return f"{running}, but {say(cluster.dead, 'is dead')}: {remedy(cluster.dead)}."
    return (
        f"{running}, and is used as it is: %ddp_restart -n {asked.num_ranks or 2} changes the "
        "number of ranks; for anything else %ddp_stop ends it first."
    )


def with_notes(table: Table, cluster: Cluster) -> Table:
    """Add to a table the features that are off."""
    if cluster.lost is not None:
        return table
    here = [each for each in cluster.states if each.host == socket.gethostname()]
    shared = sharing_note(sum(each.device == "cpu" for each in here), num_cores())
    notes = [*([shared] if shared else []), *cluster.missing]
    return replace(table, notes=(*table.notes, *notes))


def sharing_note(num_ranks: int, num_cores: int) -> str:
    """Return a sentence if ranks on CPUs far outnumber the cores that they share; else nothing."""
    if num_ranks <= MAX_RANKS_PER_CORE * num_cores:
        return ""
    return (
        f"{num_ranks} ranks share {counted(num_cores, 'core')} and take turns: what they compute "
        f"is right, but how fast says little about {num_ranks} ranks with cores of their own"
    )
