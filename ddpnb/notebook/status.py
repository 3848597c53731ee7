"""What is every rank doing?  (Notebook side.)"""

from collections.abc import Sequence

from ddpnb.notebook.cells import RunningCell
from ddpnb.notebook.cluster.cluster import Cluster, describe_exit
from ddpnb.notebook.show.table import Cell, Column, Table
from ddpnb.notebook.show.words import counted


def status_table(cluster: Cluster, cells: Sequence[RunningCell]) -> Table:
    """Return one row per rank: where it lives, and whether it is idle, busy or gone."""
    busy = {rank for cell in cells if not cell.done for rank in cell.ranks}
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
        notes=(f"{lost}: start anew with %ddp_restart",) if lost else (),
    )
