"""Stops all ranks of a run before the same step, however rarely they communicate.

The ranks agree on a target step in the process group's store:

- A rank that is asked to stop sets the target to the step after its next step.
- Every rank reads the target before each step.  A rank before the target goes on at once.  A rank
  beyond the target raises the target to its own step.
- A rank at the target waits.  If all ranks wait there, all ranks stop.
- A rank that has not read the target may be blocked in a step that needs a waiting rank.  So, after
  a pause, a waiting rank raises the target by 1, and after later pauses by 2, 4, 8, ... steps.

Each change of the target is one ``compare_set``, so all ranks see the same changes.  If a rank has
taken its last step, the target passes the last step, so the other ranks take all their steps too.
Workers that never wait for each other stop independently.  Runs on the ranks.
"""

import math
import time
from collections.abc import Callable
from typing import final

from ddpnb.compat.torch_internals import group_store
from ddpnb.rank.training.run import Run

STEPS_BETWEEN_LOOKS = 8
"""Number of steps between two reads of the target on several hosts, because a read is a message.
On one host the store is a file that a rank reads in about 10 us before each step."""
PAUSE_SECONDS = 0.05
"""Minimum time that a rank waits for a rank that may be blocked."""
POLLS_PER_PAUSE = 16
STEPS_PER_PAUSE = 4
"""Minimum time that a rank waits, in steps of this rank, because other ranks may be slower."""
PATIENCE = 20
"""Factor of the pause after all ranks have read the target, because then no rank is blocked."""


@final
class Stop:
    """Decides before each step if this rank must stop.

    Args:
        run: the run.
        wanted: returns True if this rank has been asked to stop.
    """

    def __init__(self, run: Run, wanted: Callable[[], bool]) -> None:
        plan, state = run.plan, run.state
        self._wanted = wanted
        self._key = run.name("stop")
        self._check = run.here.cancellation.check
        self._num_ranks = plan.num_ranks
        self._is_alone = plan.num_ranks == 1 or plan.stops_alone or plan.survives_deaths
        is_on_one_host = state.local_world_size == state.world_size
        self._every = 1 if is_on_one_host else STEPS_BETWEEN_LOOKS
        self._has_read = False
        self._begun_at = math.nan
        self._shortest = math.inf
        """Seconds of the fastest steps between two reads of the target; infinity if unknown."""

    def before(self, step: int) -> bool:
        """Return True if this rank must stop before ``step``, which has not begun yet."""
        if self._is_alone:
            return self._wanted()
        if step % self._every:
            return False
        self._shortest = min(self._shortest, time.monotonic() - self._begun_at)
        must_stop = self._is_asked(step) and self._meets(step)
        self._begun_at = time.monotonic()
        return must_stop

    def _is_asked(self, step: int) -> bool:
        """Return True if this rank or another rank has been asked to stop."""
        if self._has_read:
            return True
        store = group_store()
        if self._wanted():  # the value is the target, and the number of steps of the next raise
            store.compare_set(self._key, "", f"{step + self._every} {self._every}")
        elif not store.check([self._key]):
            return False
        self._has_read = True
        store.add(f"{self._key}-read", 1)
        return True

    def _meets(self, step: int) -> bool:
        """Return True if all ranks wait before ``step``; False if the target is a later step."""
        store, key = group_store(), self._key
        store.add(f"{key}-steps", 1)
        pause = max(PAUSE_SECONDS, STEPS_PER_PAUSE * self._shortest)
        num_steps, since, is_here = 0, math.nan, False
        while True:
            self._check()
            value = store.get(key).decode()
            target, num_more = map(int, value.split())
            if step < target or num_more == 0:
                return step == target
            changed = f"{step} {self._every}"
            if step == target:
                if not is_here:
                    store.add(f"{key}-{step}", 1)
                    is_here = True
                num_here, num_read, found = (
                    int(store.get(f"{key}-{name}")) for name in (step, "read", "steps")
                )
                if found != num_steps:  # another rank takes steps
                    num_steps, since = found, time.monotonic()
                patience = PATIENCE if num_read == self._num_ranks else 1
                if num_here == self._num_ranks:
                    changed = f"{step} 0"
                elif time.monotonic() - since > patience * pause:
                    changed = f"{step + num_more} {2 * num_more}"
                else:
                    time.sleep(pause / POLLS_PER_PAUSE)
                    continue
            store.compare_set(key, value, changed)
