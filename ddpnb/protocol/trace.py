"""The activities of ranks over time: the spans of traces and timelines.  Used in every process."""

from dataclasses import dataclass
from typing import Literal

from ddpnb.protocol.costs import COLLECTIVES
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import parse_size
from ddpnb.protocol.options import check_options, option

Lane = Literal["compute", "communication", "wait"]
"""The lane in which a span is drawn: computing, communication, or waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One activity of one rank, with its begin and end."""

    rank: int
    lane: Lane
    name: str
    """The name of the activity, such as ``"forward"``, ``"all_reduce"``, ``"bucket 0"``."""
    start: float
    """The begin in seconds, on the clock that all ranks of the trace share."""
    end: float
    num_bytes: int | None = None
    """The bytes of the tensors that this rank passed to the call; None if it passed no tensor."""
    group: tuple[int, ...] = ()
    """The ranks that take part, as numbers in the default group; empty if this rank is alone."""
    line: str = ""
    """The line of the user's code that made the call, such as ``"line 3"``; empty if unknown."""

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """The spans that one rank recorded while a cell ran."""

    rank: int
    spans: tuple[Span, ...]
    num_dropped: int = 0
    num_open: int = 0
    """Number of calls still open when the cell ended.  The calls' spans end when the cell ends."""
    clock_at: float = 0.0
    """The ``time.time()`` at which the clock of the spans was 0."""


# -- the demonstration of one collective ---------------------------------------------------

SHOWN = tuple(name for name in COLLECTIVES if name not in ("send", "recv"))
TRACE = "trace"
"""The argument of ``%ddp_show`` that shows the latest traced cell instead of a collective."""
NUMBER_BYTES = 4
"""Number of bytes of each element that a collective of ``%ddp_show`` sends."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "scatter", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec:
    """A collective that ranks run as a demonstration."""

    name: str
    """The name of the collective, one of ``SHOWN``."""
    ranks: tuple[int, ...]
    num_bytes: int = option(
        0,
        "size of the tensor on each rank; by default a few numbers",
        flag="--size",
        from_text=parse_size,
        most=256_000_000,
        example="4MB",
    )
    root: int | None = option(
        None, "rank that sends or receives everything; by default the first rank", example="RANK"
    )
    op: str = option(
        "sum", "reduction of the tensors", choices=("sum", "max", "min", "product"), example="NAME"
    )

    def __post_init__(self) -> None:
        if self.name not in SHOWN:
            raise one_of("collective", self.name, (*SHOWN, TRACE))
        check_options(self)
        if self.op != "sum" and self.name not in REDUCING:
            raise UserError(f"{self.name} does not reduce tensors. Remove --op.")
        if self.root is not None and self.name not in ROOTED:
            raise UserError(f"{self.name} has no root. Remove --root.")
        if self.root is not None and self.root not in self.ranks:
            raise UserError(f"--root {self.root} does not take part. Choose another rank as root.")

    @property
    def from_rank(self) -> int:
        """The number of the root: ``root``, or the first rank by default."""
        return self.ranks[0] if self.root is None else self.root


Chunks = tuple[tuple[float, ...], ...]
"""The first numbers of each chunk of a tensor; empty if the rank has no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveShown:
    """The result of one collective on one rank."""

    rank: int
    before: Chunks
    after: Chunks
    num_given: int
    """The number of elements of the tensor that this rank passes to the collective."""
    num_got: int
    """The number of elements of the tensor that this rank has afterwards."""
    seconds: float
    """Median time of one call on this rank, in seconds, over several calls."""
    small_seconds: float
    """Time of a call with the smallest possible tensor, in seconds."""
    num_bytes_sent: int | None
    """The bytes sent on this rank's TCP connections during one call; None if unknown."""
    backend: str
