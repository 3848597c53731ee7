"""Describes the state of every rank, as a table or in sentences.  Runs in the kernel."""

import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import describe_position
from ddpnb.cluster.placement import MAX_RANKS_PER_CORE, ClusterSpec
from ddpnb.cluster.wording import describe_silent, say
from ddpnb.protocol.cores import num_cores
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import options_of
from ddpnb.protocol.processes import RankCommand, RankStatus
from ddpnb.reports.formatting import counted
from ddpnb.reports.listing import ranks_table
from ddpnb.reports.table import Table

SERVICES_SECONDS = 3.0
"""Maximum time to wait for a rank's position.  A suspended rank never reports its position."""


def status_table(cluster: Cluster, busy: Collection[int], notes: Sequence[str] = ()) -> Table:
    """Return the table of ranks with each rank's state: idle, busy, or how the rank ended.

    ``busy`` has the ranks that run background work.  ``notes`` are lines under the table.
    """
    doing = dict.fromkeys(cluster.ranks, "ended")
    doing |= {rank: "busy" if rank in busy else "idle" for rank in cluster.living}
    doing |= {rank: str(cluster.exits[rank]) for rank in cluster.ranks if rank in cluster.exits}
    lost = [f"{cluster.lost}, so run %ddp_restart to start new ranks"] if cluster.lost else []
    caption = f"{counted(len(cluster.living), 'rank')} of {len(cluster.states)} alive"
    table = ranks_table(cluster.states, doing)
    return with_notes(replace(table, caption=caption, notes=(*lost, *notes)), cluster)


def describe_positions(cluster: Cluster) -> str:
    """Return the current position of each rank as text, with the stacks of busy ranks."""
    asked = {
        rank: [
            cluster.processes.command(rank, command)
            for command in (RankCommand.STATUS, RankCommand.STACK)
        ]
        for rank in cluster.living
    }
    deadline = time.monotonic() + SERVICES_SECONDS
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
            lines.append(f"rank {rank} cannot report its position: {error}")
            continue
        lines.append(describe_position(RankStatus(**where)))
        lines += ["".join(stack)] if where["is_busy"] else []
    return "\n".join(lines)


def describe_running(cluster: Cluster, asked: ClusterSpec) -> str:
    """Return a note saying that a cluster runs.

    If the cluster lacks an option of ``asked`` except the number of ranks, raise UserError.
    """
    running = f"A cluster of {counted(len(cluster.ranks), 'rank')} is already running"
    state, words = cluster.states[0], list[str]()
    kind: type = type(asked)
    here = {"device": state.device.partition(":")[0], "backend": state.backend}
    for name, each in options_of(kind).items():
        wanted, now = getattr(asked, name), getattr(cluster.spec, name, each.default)
        if name != "num_ranks" and wanted not in (each.default, now, here.get(name)):
            words += each.words(wanted)
    if words:
        option = " ".join(words)
        raise UserError(f"{running}. Run %ddp_stop, then repeat %ddp_start with {option}.")
    if cluster.dead:
        return f"{running}, but {say(cluster.dead, 'is dead')}. {cluster.remedy()}"
    return (
        f"{running} and stays unchanged. Run %ddp_restart -n {asked.num_ranks or 2} to change "
        "the number of ranks. For other changes, run %ddp_stop first."
    )


def with_notes(table: Table, cluster: Cluster) -> Table:
    """Add notes to a table: about disabled features, and about too many ranks for the CPU cores."""
    if cluster.lost is not None:
        return table
    notes, here = list(cluster.missing), socket.gethostname()
    num = sum(state.host == here and state.device == "cpu" for state in cluster.states)
    if num > MAX_RANKS_PER_CORE * (cores := num_cores()):
        notes.insert(
            0,
            f"{num} ranks share {counted(cores, 'core')} and take turns. Results are correct, "
            f"but timings do not show the speed of {num} ranks with one core each",
        )
    return replace(table, notes=(*table.notes, *notes))
