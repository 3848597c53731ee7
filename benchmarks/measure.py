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

    @property
    def kept(self) -> bool:
        if not self.limit:
            return True
        sign, bound = self.limit.split()
        return self.value <= float(bound) if sign == "<=" else self.value >= float(bound)

    def row(self) -> str:
        """Return the figure as a row of a table; the caller may add columns."""

        def spread(values: Sequence[float]) -> str:
            if len(values) < 2:
                return "".join(f"{value:.4g}" for value in values) or "-"
            middle, low, high = statistics.median(values), min(values), max(values)
            return f"{middle:.4g} ({low:.4g} to {high:.4g})"

        promise = self.limit if self.kept else f"{self.limit}, **missed**"
        return (
            f"| {self.name} | {spread(self.ours)} | {spread(self.theirs)} | {self.unit or '-'} "
            f"| {self.value:.3f} | {promise or '-'} |"
        )


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
