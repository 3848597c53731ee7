"""What every rank is doing, as a table and in sentences (kernel)."""

import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import describe
from ddpnb.cluster.monitor import describe_silent
from ddpnb.cluster.placement import MAX_RANKS_PER_CORE, ClusterSpec
from ddpnb.cluster.wording import remedy, say
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import RankCommand, RankStatus, num_cores
from ddpnb.reports.formatting import counted
from ddpnb.reports.listing import ranks_table
from ddpnb.reports.table import Table

ANSWER_SECONDS = 3.0
"""How long a rank may take to report its position; a stopped process never does."""


def status_table(cluster: Cluster, busy: Collection[int], notes: Sequence[str] = ()) -> Table:
    """Return the table of ranks, with whether each is idle, busy or gone.

    Background work keeps the ``busy`` ranks busy; ``notes`` are further lines under the table.
    """
    doing = dict.fromkeys(cluster.ranks, "gone")
    doing |= {rank: "busy" if rank in busy else "idle" for rank in cluster.living}
    doing |= {rank: str(cluster.exits[rank]) for rank in cluster.ranks if rank in cluster.exits}
    lost = [f"{cluster.lost}: %ddp_restart starts new ranks"] if cluster.lost else []
    caption = f"{counted(len(cluster.living), 'rank')} of {len(cluster.states)} alive"
    table = ranks_table(cluster.states, doing)
    return with_notes(replace(table, caption=caption, notes=(*lost, *notes)), cluster)


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
            lines.append(describe_silent([rank]))
            continue
        except RuntimeError as error:
            lines.append(f"rank {rank} cannot say where it is: {error}")
            continue
        lines.append(describe(RankStatus(**where)))
        lines += ["".join(stack)] if where["is_busy"] else []
    return "\n".join(lines)


def describe_running(cluster: Cluster, asked: ClusterSpec) -> str:
    """Say that a cluster is already running; a UserError if one on other hosts is asked for."""
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
    """Add to a table that ranks on CPUs far outnumber the cores, and which features are off."""
    if cluster.lost is not None:
        return table
    notes, here = list(cluster.missing), socket.gethostname()
    num = sum(state.host == here and state.device == "cpu" for state in cluster.states)
    if num > MAX_RANKS_PER_CORE * (cores := num_cores()):
        notes.insert(
            0,
            f"{num} ranks share {counted(cores, 'core')} and take turns: what they compute is "
            f"right, but how fast says little about {num} ranks with cores of their own",
        )
    return replace(table, notes=(*table.notes, *notes))
