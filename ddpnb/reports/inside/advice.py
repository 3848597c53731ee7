"""Which strategy suits this machine, in the terms of the known table, and why (kernel).

The table is the one that TensorFlow's strategies are usually taught with: one machine or several,
and whether GPUs are connected faster to the host or to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any, Literal, NamedTuple, final

from ddpnb.protocol.machine import RankMeasured
from ddpnb.protocol.notation import LinkSpec
from ddpnb.reports.formatting import counted, number, percent, short, size
from ddpnb.reports.table import Cell, Column, Table, pairs_table, table_row

Place = Literal["one machine", "several machines"]
Connection = Literal["CPU-GPU", "GPU-GPU", "no GPU"]

UNEVEN = 1.3
"""Ranks that differ by more than this in speed: none should wait for the slowest."""
FASTER = 1.2
"""A connection counts as faster from this ratio on."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is recommended."""

    place: Place
    connection: Connection
    choice: Choice
    instead: str
    """What is better than the table's choice here; empty: nothing is."""
    reasons: tuple[str, ...]


def advise(ranks: Sequence[RankMeasured]) -> Advice:
    """Return the recommendation for what all ranks measured."""
    place: Place = "one machine" if len({each.host for each in ranks}) == 1 else "several machines"
    connection, why = _connection(ranks)
    choice = CHOICES[place, connection]
    instead, reasons = "", [why]
    if len(ranks) == 1:
        return Advice(
            place=place,
            connection=connection,
            choice=Choice("single", "no wrapper", "OneDeviceStrategy"),
            instead="",
            reasons=(why, "There is one rank, and nothing to exchange."),
        )
    if choice.ddpnb == "ddp-shm":
        shared = _mean(ranks, "shared_all_reduce")
        if shared == 0 or FASTER * shared > _mean(ranks, "all_reduce"):
            instead = "ddp"
            reasons.append("An all-reduce through shared memory is not faster here than by gloo.")
        else:
            factor = _mean(ranks, "all_reduce") / shared
            reasons.append(f"Shared memory all-reduces {factor:.1f} times as fast as gloo.")
    rates = [each.flops for each in ranks]
    if max(rates) > UNEVEN * min(rates):
        times = (
            f"The fastest rank computes {max(rates) / min(rates):.1f} times as fast as the slowest"
        )
        if place == "one machine" and len({each.device_name for each in ranks}) == 1:
            reasons.append(
                f"{times}, although their devices are alike: something else uses this machine, so "
                "measure again when it rests."
            )
        else:
            instead = "async"
            reasons.append(
                f"{times}, for which all others would wait: a parameter server (async, "
                "ParameterServerStrategy) lets it work more."
            )
    if (together := _crowding(ranks)) is not None:
        reasons.append(together)
    return Advice(
        place=place, connection=connection, choice=choice, instead=instead, reasons=tuple(reasons)
    )


def _connection(ranks: Sequence[RankMeasured]) -> tuple[Connection, str]:
    """Return the column of the table, and why it is this one."""
    first = ranks[0]
    if first.device == "cpu":
        return "no GPU", "Ranks compute on the cores and share the host's memory."
    if first.has_peer_access is None:
        return (
            "GPU-GPU",
            "Each host has one GPU, so that GPUs have nothing but the network between.",
        )
    if first.has_peer_access:
        return "GPU-GPU", "GPUs of a host read each other's memory: they have peer access."
    return "CPU-GPU", "GPUs of a host have no peer access: copies between them go through the host."


def _crowding(ranks: Sequence[RankMeasured]) -> str | None:
    alone, together = ranks[0].flops_alone, _mean(ranks, "flops")
    if alone <= 0 or together >= 0.9 * alone:
        return None
    return (
        f"All ranks at once compute at {percent(together / alone)} of the rate of one alone: no "
        "strategy can bring that back; fewer ranks, or more cores, would."
    )


def link_of(ranks: Sequence[RankMeasured]) -> LinkSpec | None:
    """Return latency and rate for which a ring's formula gives both measured all-reduces."""
    num = len(ranks)
    if num == 1:
        return None
    latency = _mean(ranks, "latency") / (2 * (num - 1))
    seconds = max(_mean(ranks, "all_reduce") - _mean(ranks, "latency"), 1e-9)
    moved = 2 * (num - 1) / num * ranks[0].all_reduce_bytes
    return LinkSpec(bits_per_second=8 * moved / seconds, latency_seconds=latency)


def _mean(ranks: Sequence[RankMeasured], name: str) -> float:
    return fmean(getattr(each, name) for each in ranks)


# -- what is shown -------------------------------------------------------------------------


@final
class AdviceResult:
    """The recommendation, as a table with this machine's cell marked, and what was measured."""

    def __init__(self, ranks: Sequence[RankMeasured], seconds: float) -> None:
        self.ranks = tuple(ranks)
        self.seconds = seconds
        """How long measuring took."""
        self.advice = advise(ranks)

    def table(self) -> Table:
        """Return the known table; a dot marks this machine's cell."""
        return known_table(self.advice)

    def measures(self) -> Table:
        """Return what was measured."""
        return pairs_table(f"Measured in {self.seconds:.1f} s", _measures(self.ranks))

    def sentence(self) -> str:
        """Return the recommendation in one sentence."""
        advice = self.advice
        choice = advice.choice
        if not advice.instead:
            return (
                f"Use {choice.ddpnb} here (in PyTorch {choice.torch}, in TensorFlow "
                f"{choice.tensorflow})."
            )
        return (
            f"Use {advice.instead} here; the table alone says {choice.ddpnb} (in PyTorch "
            f"{choice.torch}, in TensorFlow {choice.tensorflow})."
        )

    def __repr__(self) -> str:
        reasons = "\n".join(f"  - {reason}" for reason in self.advice.reasons)
        return f"{self.sentence()}\n{reasons}\n\n{self.table().text()}\n\n{self.measures().text()}"

    def _repr_html_(self) -> str:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in self.advice.reasons)
        return (
            f"<p><strong>{escape(self.sentence())}</strong></p><ul>{reasons}</ul>"
            f"{self.table().html()}{self.measures().html()}"
        )

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


def _measures(ranks: Sequence[RankMeasured]) -> dict[str, str]:
    first, num = ranks[0], len(ranks)
    flops = [each.flops for each in ranks]
    hosts = len({each.host for each in ranks})
    shown = {
        "ranks": f"{num} on {counted(hosts, 'host')}, {first.device_name}, {first.backend}",
        "float32 matrices": f"{short(min(flops))} to {short(max(flops))} FLOP/s a rank, all at "
        f"once; {short(first.flops_alone)} alone",
    }
    if num > 1:
        link = link_of(ranks)
        assert link is not None
        shown[f"all-reduce by {first.backend}"] = (
            f"{number(1e6 * _mean(ranks, 'latency'))} µs for a number, "
            + _all_reduce(first, _mean(ranks, "all_reduce"))
            + f"; as a ring: {number(1e6 * link.latency_seconds)} µs a message, "
            + (f"{short(link.bits_per_second / 8)}B/s")
        )
    if first.shared_all_reduce:
        shown["all-reduce in shared memory"] = _all_reduce(first, _mean(ranks, "shared_all_reduce"))
    return shown


def _all_reduce(first: RankMeasured, seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms for {size(first.all_reduce_bytes)}"
