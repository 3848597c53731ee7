"""Which strategy suits where the ranks live, marked in the known table, and why (kernel).

The table is the one that TensorFlow's strategies are usually taught with: one machine or several,
and whether GPUs are connected faster to the host or to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from ddpnb.protocol.messages import RankState
from ddpnb.reports.kit import RANK_COLOURS, Shown
from ddpnb.reports.table import Cell, Column, Table, table_row

CONNECTIONS = (
    "faster CPU-GPU connection",
    "faster GPU-GPU connection",
    "no GPU: ranks on cores",
)


class Choice(NamedTuple):
    """A cell of the table."""

    ddpnb: str
    torch: str
    tensorflow: str


ACROSS = Choice("ddp", "DistributedDataParallel over torchrun", "MultiWorkerMirroredStrategy")
CHOICES: Mapping[str, Sequence[Choice]] = {
    "one machine": (
        Choice("central", "none of its own: parameters on the CPU", "CentralStorageStrategy"),
        Choice("ddp", "DistributedDataParallel", "MirroredStrategy"),
        Choice("ddp-shm", "DistributedDataParallel (gloo)", "MirroredStrategy on CPUs"),
    ),
    "several machines": (
        ACROSS,
        ACROSS,
        Choice("ddp", "DistributedDataParallel (gloo)", "MultiWorkerMirroredStrategy on CPUs"),
    ),
}
"""By place, one for each of the ``CONNECTIONS``."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Advice(Shown):
    """What is recommended, and why: a table with this machine's cell marked."""

    cell: tuple[str, int]
    """Place and connection of this machine."""
    choice: Choice
    reason: str

    @classmethod
    def of(cls, ranks: Sequence[RankState]) -> "Advice":
        """Return the recommendation for where the ranks live."""
        place = list(CHOICES)[len({each.host for each in ranks}) > 1]
        connection, reason = _connection(ranks[0])
        choice = CHOICES[place][connection]
        if len(ranks) == 1:
            choice = Choice("single", "no wrapper", "OneDeviceStrategy")
            reason = "There is one rank, and nothing to exchange."
        return cls(cell=(place, connection), choice=choice, reason=reason)

    def table(self) -> Table:
        """Return the recommendation above the known table, in which this machine is marked."""
        ours, torch, tensorflow = self.choice
        rows = []
        for place, choices in CHOICES.items():
            cells = []
            for number, choice in enumerate(choices):
                is_here = (place, number) == self.cell
                text = f"{choice.ddpnb}  ◀ this machine" if is_here else choice.ddpnb
                quiet = f"{choice.torch}; {choice.tensorflow}"
                cells.append(Cell(text=text, quiet=quiet, dot=RANK_COLOURS[0] if is_here else ""))
            rows.append(table_row(place, *cells))
        return Table(
            caption=f"Use {ours} here (in PyTorch {torch}, in TensorFlow {tensorflow}). "
            f"{self.reason}",
            columns=(
                Column(title=""),
                *(Column(title=each, is_prose=True) for each in CONNECTIONS),
            ),
            rows=tuple(rows),
            notes=(
                "A cell: here; in PyTorch; in TensorFlow.  Where workers differ in speed, or come "
                "and go: async (ParameterServerStrategy), on any machine.",
            ),
        )

    def text(self) -> str:
        """Return the table."""
        return self.table().text()


def _connection(rank: RankState) -> tuple[int, str]:
    """Return the column of the table, and why it is this one."""
    if rank.device == "cpu":
        return 2, "Ranks compute on the cores and share the host's memory."
    if rank.has_peer_access is None:
        return 1, "Each host has one GPU, with nothing but the network between them."
    if rank.has_peer_access:
        return 1, "GPUs of a host read each other's memory: they have peer access."
    return 0, "GPUs of a host have no peer access: copies between them go through the host."
