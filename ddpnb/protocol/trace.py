"""What ranks did, and when: the spans of which traces and time lines are made (all processes)."""

from dataclasses import dataclass
from typing import Literal

from ddpnb.protocol.costs import COLLECTIVES
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import parse_size
from ddpnb.protocol.options import check_options, option

Lane = Literal["compute", "communication", "wait"]
"""Where a span is drawn: what a processor or device did, what was sent, what was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one rank did."""

    rank: int
    """The number in the default group."""
    lane: Lane
    name: str
    """Such as ``"forward"``, ``"all_reduce"``, ``"bucket 0"``."""
    start: float
    """In seconds; of the clock of the trace, which all of its ranks share."""
    end: float
    num_bytes: int | None = None
    """The size of the rank's own tensors that the call was given; None: it has none."""
    group: tuple[int, ...] = ()
    """The ranks that take part, as the default group numbers them; empty: only this one."""
    line: str = ""
    """Where in the user's code it was called, such as ``"line 3"``; empty: not known."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """What one rank recorded while a cell ran."""

    rank: int
    spans: tuple[Span, ...]
    num_dropped: int = 0
    num_open: int = 0
    """Calls that had not ended when the cell did; their spans end with the cell."""
    clock_at: float = 0.0
    """``time.time()`` when the clock of its spans was 0."""


# -- one collective, shown -----------------------------------------------------------------

SHOWN = tuple(name for name in COLLECTIVES if name not in ("send", "recv"))
TRACE = "trace"
"""What else ``%ddp_show`` takes: the latest cell that was traced."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "scatter", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec:
    """One collective to be run on the ranks and shown."""

    name: str
    """One of ``SHOWN``."""
    ranks: tuple[int, ...]
    num_bytes: int = option(
        0,
        "of the tensor that a rank gives; by default a few numbers",
        flag="--size",
        from_text=parse_size,
        most=256_000_000,
        example="4MB",
    )
    root: int | None = option(
        None, "the rank that gives, or gets, everything; by default the first", example="RANK"
    )
    op: str = option(
        "sum", "what is computed", choices=("sum", "max", "min", "product"), example="NAME"
    )

    def __post_init__(self) -> None:
        if self.name not in SHOWN:
            raise one_of("collective", self.name, (*SHOWN, TRACE))
        check_options(self)
        if self.op != "sum" and self.name not in REDUCING:
            raise UserError(f"{self.name} computes nothing: leave --op out.")
        if self.root is not None and self.name not in ROOTED:
            raise UserError(f"{self.name} has no root: leave --root out.")
        if self.root is not None and self.root not in self.ranks:
            raise UserError(f"--root {self.root} is not among the ranks that take part.")

    @property
    def from_rank(self) -> int:
        """The root."""
        return self.ranks[0] if self.root is None else self.root


Chunks = tuple[tuple[float, ...], ...]
"""The first numbers of each chunk of a tensor; empty: the rank has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveShown:
    """What one collective did on one rank."""

    rank: int
    before: Chunks
    after: Chunks
    num_given: int
    """Numbers in the tensor that this rank gives."""
    num_got: int
    """Numbers in the tensor that it has afterwards."""
    seconds: float
    """Of one call, the median of several, on this rank."""
    small_seconds: float
    """Of a call with as few numbers as there can be."""
    num_bytes_sent: int | None
    """Counted on this rank's TCP connections during one call; None: they cannot be counted."""
    backend: str
