"""Which strategy suits where the ranks live, marked in the known table, and why (kernel).

The table is the one that TensorFlow's strategies are usually taught with: one machine or several,
and whether GPUs are connected faster to the host or to each other.
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


ACROSS = ("ddp", "DistributedDataParallel over torchrun; MultiWorkerMirroredStrategy")
CHOICES: Mapping[str, Sequence[tuple[str, str]]] = {
    "one machine": (
        ("central", "none of its own: parameters on the CPU; CentralStorageStrategy"),
        ("ddp", "DistributedDataParallel; MirroredStrategy"),
        ("ddp-shm", "DistributedDataParallel (gloo); MirroredStrategy on CPUs"),
    ),
    "several machines": (
        ACROSS,
        ACROSS,
        ("ddp", "DistributedDataParallel (gloo); MultiWorkerMirroredStrategy on CPUs"),
    ),
}
"""By place, one for each of the ``CONNECTIONS``: here; in PyTorch and in TensorFlow."""


def advice(ranks: Sequence[RankState]) -> Table:
    """Return the known table with this machine's cell marked; the caption recommends, and why."""
    place = list(CHOICES)[len({each.host for each in ranks}) > 1]
    connection, reason = _connection(ranks[0])
    ours, theirs = CHOICES[place][connection]
    if len(ranks) == 1:
        ours, theirs = "single", "no wrapper; OneDeviceStrategy"
        reason = "There is one rank, and nothing to exchange."

    def cell(at: tuple[str, int], name: str, quiet: str) -> Cell:
        is_here = at == (place, connection)
        text = f"{name}  ◀ this machine" if is_here else name
        return Cell(text=text, quiet=quiet, dot=RANK_COLOURS[0] if is_here else "")

    return Table(
        caption=f"Use {ours} here ({theirs}). {reason}",
        columns=(Column(title=""), *(Column(title=each, is_prose=True) for each in CONNECTIONS)),
        rows=tuple(
            table_row(head, *(cell((head, n), *choice) for n, choice in enumerate(row)))
            for head, row in CHOICES.items()
        ),
        notes=(
            "A cell: here; in PyTorch; in TensorFlow.  Where workers differ in speed, or come "
            "and go: async (ParameterServerStrategy), on any machine.",
        ),
    )


def _connection(rank: RankState) -> tuple[int, str]:
    """Return the column of the table, and why it is this one."""
    if rank.device == "cpu":
        return 2, "Ranks compute on the cores and share the host's memory."
    if rank.has_peer_access is None:
        return 1, "Each host has one GPU, with nothing but the network between them."
    if rank.has_peer_access:
        return 1, "GPUs of a host read each other's memory: they have peer access."
    return 0, "GPUs of a host have no peer access: copies between them go through the host."
