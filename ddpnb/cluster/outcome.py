"""Collects the results, failures and dead ranks of a call.  Runs in the kernel."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddpnb.cluster.call import CallEvent, Lost, Returned
from ddpnb.cluster.hangs import Hang
from ddpnb.protocol.cell_messages import CellReport, Failure


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The values that the ranks of one call returned, and how the call ended."""

    survives: Callable[[int], bool] = lambda _: False
    """Function that returns True if the other ranks can continue without the given dead rank."""
    returned: dict[int, Any] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Maps each dead rank that the other ranks need to the cause of its death."""
    survived: dict[int, str] = field(default_factory=dict)
    """Maps each other dead rank to the cause of its death."""
    killed: set[int] = field(default_factory=set)
    """The ranks that ddpnb killed because they waited without end."""
    hang: Hang | None = None
    timed_out: bool = False
    failed_at: float | None = None
    """Time at which the first rank failed or was lost."""
    last_end_at: float = 0.0
    """Time at which a rank last returned or died."""

    def note(self, event: CallEvent, now: float) -> None:
        """Record an event that arrived at the time ``now``, in seconds."""
        if isinstance(event, Returned):
            self.returned[event.rank] = event.value
        elif isinstance(event, Lost):
            deaths = self.survived if self.survives(event.rank) else self.lost
            deaths[event.rank] = event.cause
        else:
            return
        self.last_end_at = now
        if self.failed_at is None and (self.failures or self.lost):
            self.failed_at = now

    @property
    def failures(self) -> list[Failure]:
        """The failures that ranks have returned."""
        values = [v.failure if isinstance(v, CellReport) else v for v in self.returned.values()]
        return [value for value in values if isinstance(value, Failure)]

    @property
    def num_collectives(self) -> dict[int, int]:
        """Maps each rank that has finished the cell to the number of its collective calls."""
        reports = self.returned.items()
        return {rank: r.num_collectives for rank, r in reports if isinstance(r, CellReport)}

    def is_waited_for(self, now: float, seconds: float) -> bool:
        """Return True if a rank has failed and no rank has ended in the last ``seconds``.

        The ranks that are still running may be waiting for the failed rank.
        """
        return self.failed_at is not None and now - self.last_end_at > seconds

    def causes(self) -> str:
        """Describe the failures so far, except failures that another rank caused."""
        causes = [f"rank {rank} {cause}" for rank, cause in self.lost.items()]
        own = [each for each in self.failures if not each.is_consequence]
        return "; ".join([*causes, *(f"rank {f.rank} failed: {f.name}: {f.text}" for f in own)])
