"""Is the process group fit for the next call, and which one is it?  (Notebook side.)"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ddpnb.protocol.messages import StaleVariable
from ddpnb.protocol.rank_sets import format_ranks


@dataclass(kw_only=True, slots=True)
class GroupState:
    """The process group of the ranks, as the notebook knows it."""

    generation: int = 0
    """How many groups there were before it."""
    is_aborted: bool = False
    """Whether no collective can be called in it any more."""
    is_checked: bool = False
    """Whether it compares collectives over the ranks at each call."""
    aborts: "dict[int, Future[Any]]" = field(default_factory=dict)
    """The last cut that each rank was told to make; done when it has made it."""

    def is_fit(self, *, is_checked: bool) -> bool:
        """Tell whether it can be used as it is."""
        return not self.is_aborted and self.is_checked == is_checked

    def wait_for_aborts(self, living: Callable[[], Collection[int]], timeout: float) -> None:
        """Wait until no rank cuts connections any more: it would cut those of the next group.

        Args:
            living: returns the ranks that live; no other is waited for.
            timeout: in seconds.

        Raises:
            TimeoutError: where a rank has not done it by then.
        """
        deadline = time.monotonic() + timeout
        aborts = dict(self.aborts)
        while cutting := {rank for rank in living() if rank in aborts and not aborts[rank].done()}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {format_ranks(cutting)} does not leave its group")
            time.sleep(0.002)
        self.aborts.clear()

    def begin(self) -> None:
        """Count up; the new group is no better than cut until it is formed."""
        self.generation += 1
        self.is_aborted = True

    def note_formed(self, *, is_checked: bool) -> None:
        """Remember that all ranks have joined it."""
        self.is_aborted, self.is_checked = False, is_checked


def ranks_of(stale: Mapping[int, Sequence[StaleVariable]]) -> dict[StaleVariable, list[int]]:
    """Turn what is tied to the old group on each rank into the ranks of each."""
    ranks: dict[StaleVariable, list[int]] = {}
    for rank, found in stale.items():
        for each in found:
            ranks.setdefault(each, []).append(rank)
    return ranks
