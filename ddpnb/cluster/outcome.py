"""What has become of a call so far, and what that asks for; it knows no process (kernel)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddpnb.cluster.call import CallEvent, Lost, Returned
from ddpnb.cluster.hangs import Hang
from ddpnb.protocol.messages import CellReport, Failure


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What the ranks of one call have returned, and how it ends."""

    survives: Callable[[int], bool] = lambda _: False
    """Returns whether the other ranks can go on without one that has died."""
    returned: dict[int, Any] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that died where the others cannot go on without them, each with the cause."""
    hang: Hang | None = None
    timed_out: bool = False
    failed_at: float | None = None
    """When the first rank failed, or was lost."""
    last_end_at: float = 0.0
    """When a rank last returned or died."""

    def note(self, event: CallEvent, now: float) -> None:
        """Take an event that has come at ``now``, in seconds."""
        if isinstance(event, Returned):
            self.returned[event.rank] = event.value
        elif isinstance(event, Lost):
            self.lost |= {} if self.survives(event.rank) else {event.rank: event.cause}
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
        """How many collectives each rank has called in a cell that it has finished."""
        reports = self.returned.items()
        return {rank: r.num_collectives for rank, r in reports if isinstance(r, CellReport)}

    def is_waited_for(self, now: float, seconds: float) -> bool:
        """Return whether a rank has failed, and no other has ended for so long since.

        Those that still run may wait for it.
        """
        return self.failed_at is not None and now - self.last_end_at > seconds

    def causes(self) -> str:
        """Say what has failed so far; what failed because another did is left out."""
        causes = [f"rank {rank} {cause}" for rank, cause in self.lost.items()]
        own = [each for each in self.failures if not each.is_consequence]
        return "; ".join([*causes, *(f"rank {f.rank} failed: {f.name}: {f.text}" for f in own)])
