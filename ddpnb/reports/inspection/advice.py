"""Advice on which strategy suits the current hardware, with a table and a reason.

TensorFlow's strategies are usually taught with this table.  One row is for one machine, and
one row is for several machines.  The columns say which connection is faster: between CPU and GPU,
or between GPUs.  Runs in the kernel.
"""

from collections.abc import Mapping, Sequence

from ddpnb.protocol.messages import RankState
from ddpnb.reports.kit import RANK_COLOURS
from ddpnb.reports.table import Cell, Column, Table, table_row

CONNECTIONS = (
    "faster CPU-GPU connection",
    "faster GPU-GPU connection",
    "no GPU: ranks on cores",
)


SEVERAL_HOSTS = ("ddp", "DistributedDataParallel over torchrun; MultiWorkerMirroredStrategy")
ADVICE: Mapping[str, Sequence[tuple[str, str]]] = {
    "one machine": (
        ("central", "no equivalent (parameters on the CPU); CentralStorageStrategy"),
        ("ddp", "DistributedDataParallel; MirroredStrategy"),
        ("ddp", "DistributedDataParallel (gloo); MirroredStrategy on CPUs"),
    ),
    "several machines": (
        SEVERAL_HOSTS,
        SEVERAL_HOSTS,
        ("ddp", "DistributedDataParallel (gloo); MultiWorkerMirroredStrategy on CPUs"),
    ),
}
"""Rows of the table.  Each cell has a strategy's name in ddpnb and in other libraries."""


def advice_table(ranks: Sequence[RankState]) -> Table:
    """Return the table, with a mark at this machine's cell and the advice in the caption."""
    place = list(ADVICE)[len({each.host for each in ranks}) > 1]
    connection, reason = _connection(ranks[0])
    ours, theirs = ADVICE[place][connection]
    if len(ranks) == 1:
        ours, theirs = "single", "no wrapper; OneDeviceStrategy"
        reason = "There is only one rank, so there is no communication."

    def cell(at: tuple[str, int], name: str, quiet: str) -> Cell:
        is_here = at == (place, connection)
        text = f"{name}  ◀ this machine" if is_here else name
        return Cell(text=text, quiet=quiet, dot=RANK_COLOURS[0] if is_here else "")

    return Table(
        caption=f"Use {ours} here ({theirs}). {reason}",
        columns=(Column(title=""), *(Column(title=each, is_prose=True) for each in CONNECTIONS)),
        rows=tuple(
            table_row(head, *(cell((head, n), *choice) for n, choice in enumerate(row)))
            for head, row in ADVICE.items()
        ),
        notes=(
            "Each cell has the strategy's name in ddpnb, PyTorch and TensorFlow.  If workers "
            "differ in speed, join or leave, use async (ParameterServerStrategy) on any machine.",
        ),
    )


def _connection(rank: RankState) -> tuple[int, str]:
    """Return the index of this machine's column in the table, and a sentence that says why."""
    if rank.device == "cpu":
        return 2, "Ranks compute on CPU cores and share the host's memory."
    if rank.has_peer_access is None:
        return 1, "Each host has only one GPU, so only the network connects the GPUs."
    if rank.has_peer_access:
        return 1, "The GPUs of a host can read each other's memory directly (peer access)."
    return 0, "The GPUs of a host have no peer access, so copies between GPUs go through the host."
