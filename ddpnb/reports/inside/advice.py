"""Which strategy suits where the ranks live, marked in the known table, and why (kernel).

The table is the one that TensorFlow's strategies are usually taught with: one machine or several,
and whether GPUs are connected faster to the host or to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, final

from ddpnb.protocol.messages import RankState
from ddpnb.reports.kit import RANK_COLOURS, Shown
from ddpnb.reports.table import Cell, Column, Table, table_row

PLACES = ("one machine", "several machines")
CPU_GPU, GPU_GPU, NO_GPU = CONNECTIONS = (
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
CHOICES: Mapping[tuple[str, str], Choice] = {
    ("one machine", CPU_GPU): Choice(
        "central", "none of its own: parameters on the CPU", "CentralStorageStrategy"
    ),
    ("one machine", GPU_GPU): Choice("ddp", "DistributedDataParallel", "MirroredStrategy"),
    ("one machine", NO_GPU): Choice(
        "ddp-shm", "DistributedDataParallel (gloo)", "MirroredStrategy on CPUs"
    ),
    ("several machines", CPU_GPU): ACROSS,
    ("several machines", GPU_GPU): ACROSS,
    ("several machines", NO_GPU): Choice(
        "ddp", "DistributedDataParallel (gloo)", "MultiWorkerMirroredStrategy on CPUs"
    ),
}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Advice(Shown):
    """What is recommended, and why: a table with this machine's cell marked."""

    place: str
    connection: str
    choice: Choice
    reason: str

    @classmethod
    def of(cls, ranks: Sequence[RankState]) -> "Advice":
        """Return the recommendation for where the ranks live."""
        place = PLACES[len({each.host for each in ranks}) > 1]
        connection, reason = _connection(ranks[0])
        choice = CHOICES[place, connection]
        if len(ranks) == 1:
            choice = Choice("single", "no wrapper", "OneDeviceStrategy")
            reason = "There is one rank, and nothing to exchange."
        return cls(place=place, connection=connection, choice=choice, reason=reason)

    def table(self) -> Table:
        """Return the known table; a dot marks this machine's cell."""
        rows = [
            table_row(place, *(self._cell(place, connection) for connection in CONNECTIONS))
            for place in PLACES
        ]
        return Table(
            caption="Which strategy suits which machine: here, in PyTorch, in TensorFlow",
            columns=(
                Column(title=""),
                *(Column(title=each, is_prose=True) for each in CONNECTIONS),
            ),
            rows=tuple(rows),
            notes=(
                "Where workers differ in speed, or come and go: async (in TensorFlow "
                "ParameterServerStrategy), on any machine.",
            ),
        )

    def _cell(self, place: str, connection: str) -> Cell:
        choice = CHOICES[place, connection]
        is_here = (place, connection) == (self.place, self.connection)
        text = f"{choice.ddpnb}  ◀ this machine" if is_here else choice.ddpnb
        quiet = f"{choice.torch}; {choice.tensorflow}"
        return Cell(text=text, quiet=quiet, dot=RANK_COLOURS[0] if is_here else "")

    def sentence(self) -> str:
        """Return the recommendation and its reason."""
        choice = self.choice
        return (
            f"Use {choice.ddpnb} here (in PyTorch {choice.torch}, in TensorFlow "
            f"{choice.tensorflow}). {self.reason}"
        )

    def text(self) -> str:
        """Return the sentence and the table."""
        return f"{self.sentence()}\n\n{self.table().text()}"

    def html(self, images: str) -> str:
        """Return the sentence and the table."""
        return f"<p><strong>{escape(self.sentence())}</strong></p>{super().html(images)}"


def _connection(rank: RankState) -> tuple[str, str]:
    """Return the column of the table, and why it is this one."""
    if rank.device == "cpu":
        return NO_GPU, "Ranks compute on the cores and share the host's memory."
    if rank.has_peer_access is None:
        return GPU_GPU, "Each host has one GPU, with nothing but the network between them."
    if rank.has_peer_access:
        return GPU_GPU, "GPUs of a host read each other's memory: they have peer access."
    return CPU_GPU, "GPUs of a host have no peer access: copies between them go through the host."
