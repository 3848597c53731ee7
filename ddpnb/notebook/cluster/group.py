"""Is the process group fit for the next call, and which one is it?  (Notebook side.)"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpnb.wire import Tied


@dataclass(kw_only=True, slots=True)
class GroupState:
    """The process group of the ranks, as the notebook knows it."""

    generation: int = 0
    """How many groups there were before it."""
    is_cut: bool = False
    """Whether no collective can be called in it any more."""
    is_checked: bool = False
    """Whether it compares collectives over the ranks at each call."""

    def is_fit(self, *, is_checked: bool) -> bool:
        """Tell whether it can be used as it is."""
        return not self.is_cut and self.is_checked == is_checked

    def begin(self) -> None:
        """Count up; the new group is no better than cut until it is formed."""
        self.generation += 1
        self.is_cut = True

    def note_formed(self, *, is_checked: bool) -> None:
        """Remember that all ranks have joined it."""
        self.is_cut, self.is_checked = False, is_checked


def ranks_of(tied: Mapping[int, Sequence[Tied]]) -> dict[Tied, list[int]]:
    """Turn what is tied to the old group on each rank into the ranks of each."""
    ranks: dict[Tied, list[int]] = {}
    for rank, found in tied.items():
        for each in found:
            ranks.setdefault(each, []).append(rank)
    return ranks
