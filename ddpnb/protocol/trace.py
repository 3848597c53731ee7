"""What ranks did, and when: the spans of which traces and time lines are made (all processes)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "communication", "wait", "server", "store"]
"""Where a span is drawn: what a processor or device did, what was sent, what was waited for,
what the parameter server did, what the process group's store was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one rank did."""

    rank: int
    """The number in the default group; -1: the parameter server."""
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
    key: str = ""
    """Of the process group's store, for a call of it."""
    value: str = ""
    """What such a call set or returned, shortened."""

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"{self.name} ends before it starts")

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the ranks did in one cell, or in one step."""

    title: str
    num_ranks: int
    spans: Sequence[Span]
    num_dropped: int = 0
    """Spans that were not kept because there were too many."""
    notes: tuple[str, ...] = ()
    """Sentences for below the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """What one rank recorded while a cell ran."""

    rank: int
    spans: tuple[Span, ...]
    num_dropped: int = 0
    num_open: int = 0
    """Calls that had not ended when the cell did; their spans end with the cell."""
    own_seconds: float = 0.0
    """How long the calls took longer because they were recorded."""
