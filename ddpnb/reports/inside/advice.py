"""Which strategy suits this machine, in the terms of the known table, and why (kernel).

The table is the one that TensorFlow's strategies are usually taught with: one machine or several,
and whether GPUs are connected faster to the host or to each other.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple, final

from ddpnb.protocol.messages import RankState
from ddpnb.reports.table import Cell, Column, Table, table_row

Place = Literal["one machine", "several machines"]
Connection = Literal["CPU-GPU", "GPU-GPU", "no GPU"]

MARK = "#3f90da"


class Choice(NamedTuple):
    """A cell of the table."""

    ddpnb: str
    torch: str
    tensorflow: str


CHOICES: Mapping[tuple[Place, Connection], Choice] = {
    ("one machine", "CPU-GPU"): Choice(
        "central", "none of its own: parameters on the CPU", "CentralStorageStrategy"
    ),
    ("one machine", "GPU-GPU"): Choice("ddp", "DistributedDataParallel", "MirroredStrategy"),
    ("one machine", "no GPU"): Choice(
        "ddp-shm", "DistributedDataParallel (gloo)", "MirroredStrategy on CPUs"
    ),
    ("several machines", "CPU-GPU"): Choice(
        "ddp", "DistributedDataParallel over torchrun", "MultiWorkerMirroredStrategy"
    ),
    ("several machines", "GPU-GPU"): Choice(
        "ddp", "DistributedDataParallel over torchrun", "MultiWorkerMirroredStrategy"
    ),
    ("several machines", "no GPU"): Choice(
        "ddp", "DistributedDataParallel (gloo)", "MultiWorkerMirroredStrategy on CPUs"
    ),
}
HEADS: Mapping[Connection, str] = {
    "CPU-GPU": "faster CPU-GPU connection",
    "GPU-GPU": "faster GPU-GPU connection",
    "no GPU": "no GPU: ranks on cores",
}


class Advice(NamedTuple):
    """What is recommended, and why."""

    place: Place
    connection: Connection
    choice: Choice
    reason: str


def advise(ranks: Sequence[RankState]) -> Advice:
    """Return the recommendation for where the ranks live."""
    place: Place = "one machine" if len({each.host for each in ranks}) == 1 else "several machines"
    connection, reason = _connection(ranks[0])
    choice = CHOICES[place, connection]
    if len(ranks) == 1:
        choice = Choice("single", "no wrapper", "OneDeviceStrategy")
        reason = "There is one rank, and nothing to exchange."
    return Advice(place, connection, choice, reason)


def _connection(rank: RankState) -> tuple[Connection, str]:
    """Return the column of the table, and why it is this one."""
    if rank.device == "cpu":
        return "no GPU", "Ranks compute on the cores and share the host's memory."
    if rank.has_peer_access is None:
        return "GPU-GPU", "Each host has one GPU, with nothing but the network between them."
    if rank.has_peer_access:
        return "GPU-GPU", "GPUs of a host read each other's memory: they have peer access."
    return "CPU-GPU", "GPUs of a host have no peer access: copies between them go through the host."


@final
class AdviceResult:
    """The recommendation, as a table with this machine's cell marked."""

    def __init__(self, ranks: Sequence[RankState]) -> None:
        self.advice = advise(ranks)

    def table(self) -> Table:
        """Return the known table; a dot marks this machine's cell."""
        return known_table(self.advice)

    def sentence(self) -> str:
        """Return the recommendation and its reason."""
        choice = self.advice.choice
        return (
            f"Use {choice.ddpnb} here (in PyTorch {choice.torch}, in TensorFlow "
            f"{choice.tensorflow}). {self.advice.reason}"
        )

    def __repr__(self) -> str:
        return f"{self.sentence()}\n\n{self.table().text()}"

    def _repr_html_(self) -> str:
        return f"<p><strong>{escape(self.sentence())}</strong></p>{self.table().html()}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return text and HTML."""
        return {"text/plain": repr(self), "text/html": self._repr_html_()}


def known_table(advice: Advice) -> Table:
    """Return the table of places and connections, with this machine's cell marked."""
    places: tuple[Place, ...] = ("one machine", "several machines")
    rows = [
        table_row(place, *(_cell(place, connection, advice) for connection in HEADS))
        for place in places
    ]
    return Table(
        caption="Which strategy suits which machine; this one is marked",
        columns=(Column(title=""), *(Column(title=head, is_prose=True) for head in HEADS.values())),
        rows=tuple(rows),
        notes=(
            "Of each: the strategy here, then in PyTorch and in TensorFlow.",
            "Where workers differ in speed, or come and go: async (in TensorFlow "
            "ParameterServerStrategy), on any machine.",
        ),
    )


def _cell(place: Place, connection: Connection, advice: Advice) -> Cell:
    choice = CHOICES[place, connection]
    is_here = (place, connection) == (advice.place, advice.connection)
    text = f"{choice.ddpnb}  ◀ this machine" if is_here else choice.ddpnb
    quiet = f"PyTorch: {choice.torch}; TensorFlow: {choice.tensorflow}"
    return Cell(text=text, quiet=quiet, dot=MARK if is_here else "")
