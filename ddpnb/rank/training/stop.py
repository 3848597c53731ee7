"""When do all ranks stop a run that is to end early?  (ranks)"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ddpnb.compat.torch_internals import group_store
from ddpnb.rank.laboratory.clock import VirtualClock
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.training.timing import Clock

STEPS_BETWEEN_LOOKS = 8
"""How often ranks of several hosts look whether to stop."""


@final
@dataclass(eq=False)
class Stop:
    """The step before which all ranks of a run stop, without a message per step.

    The first rank that is asked to stop chooses the step before which all ranks stop.  It writes
    the number to the process group's store, where all ranks look.  On one host that is a file, and
    a look takes some 10 us; on several it takes a message, so ranks look before a few steps only.

    A synchronous step ends on no rank before every rank has begun it.  So a rank is at most
    ``num_steps_ahead`` steps ahead of the writer (0 on a CPU, a few on a GPU, see ``timing``).
    Within twice as many steps, every rank has looked at least once, and no rank is past the chosen
    step by then.  Workers that never wait for each other stop each for itself.
    """

    context: RunContext
    clock: Clock | VirtualClock
    wanted: Callable[[], bool]
    """Returns whether this rank has been asked to stop."""

    def __post_init__(self) -> None:
        plan, state = self.context.plan, self.context.state
        self._key = self.context.name("stop")
        self._is_alone = plan.num_ranks == 1 or not plan.synchronous or plan.num_steps_ahead is None
        is_on_one_host = state.local_world_size == state.world_size
        self._every = 1 if is_on_one_host else STEPS_BETWEEN_LOOKS
        self._margin = 2 * (self.clock.num_steps_ahead + (plan.num_steps_ahead or 0) + self._every)
        self._last: int | None = None

    def before(self, step: int) -> bool:
        """Return whether to stop before this step, which this rank has not begun."""
        if self._is_alone:
            return self.wanted()
        if self._last is None and step % self._every == 0:
            self._last = self._chosen(step)
        return self._last is not None and step >= self._last

    def _chosen(self, step: int) -> int | None:
        """Return the last step, if a rank has chosen one; this rank does where it is asked to."""
        store = group_store()
        if self.wanted():
            store.compare_set(self._key, "", str(step + self._margin))  # unless one was first
        return int(store.get(self._key)) if store.check([self._key]) else None
