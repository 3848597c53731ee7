"""Measures two ways of doing the same work in turns, and compares their medians."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measurement, and the promise about it."""

    name: str
    unit: str
    ours: list[float]
    theirs: list[float] = field(default_factory=list)
    limit: str = ""
    """The promise about ``value``, such as ``"<= 0.65"``; empty: no promise."""
    note: str = ""

    @property
    def value(self) -> float:
        """The median of ``ours``, divided by the median of ``theirs`` if there are any."""
        ours = statistics.median(self.ours)
        return ours / statistics.median(self.theirs) if self.theirs else ours

    def row(self) -> str:
        """Return the figure as a row of a table; the caller may add columns."""

        def spread(values: Sequence[float]) -> str:
            if len(values) < 2:
                return "".join(f"{value:.4g}" for value in values) or "-"
            middle, low, high = statistics.median(values), min(values), max(values)
            return f"{middle:.4g} ({low:.4g} to {high:.4g})"

        is_kept = not self.limit or keeps(self.limit, self.value)
        promise = self.limit if is_kept else f"{self.limit}, **missed**"
        return (
            f"| {self.name} | {spread(self.ours)} | {spread(self.theirs)} | {self.unit or '-'} "
            f"| {self.value:.3f} | {promise or '-'} |"
        )


def keeps(limit: str, value: float) -> bool:
    """Return True if a value keeps a promise such as ``"<= 0.65"``."""
    sign, bound = limit.split()[:2]
    return value <= float(bound) if sign == "<=" else value >= float(bound)


HEAD = (
    "| measurement | ddpnb: median (range) | other: median (range) | unit | value or ratio | "
    "promise | measured on |\n"
    "|---|---|---|---|---|---|---|"
)


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Call both functions alternately; the first call of each is not counted."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def pss(pid: int) -> float:
    """Return the MB (PSS) of a process; memory shared by several processes is divided by them."""
    return float(psutil.Process(pid).memory_full_info().pss / 1e6)
