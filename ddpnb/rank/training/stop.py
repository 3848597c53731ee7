"""When do all ranks stop a run that one of them is asked to stop?  (ranks)"""

import contextlib
import os
from collections.abc import Callable
from typing import final

from ddpnb.compat.torch_internals import group_store
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.training.timing import Clock


@final
class Stop:
    """The step before which all ranks of a run stop, without a message per step.

    The first rank that is asked to stop chooses the step before which all ranks stop.  It writes
    the number to a file in the folder that all ranks of the host share.  Each rank looks for the
    file before each step, which takes microseconds.

    A synchronous step ends on no rank before every rank has begun it.  So a rank is at most
    ``num_steps_ahead`` steps ahead of the writer (0 on a CPU, a few on a GPU, see ``timing``).
    Within twice as many steps, every rank has looked for the file at least once.  No rank is past
    the chosen step by then, and none misses the file before it is removed.  Workers that never wait
    for each other stop each for itself, as soon as they see the file.

    Ranks of several hosts have the process group's store in place of the file.  Looking takes a
    message there, so they look only from when they expect a stop, all of them before one is asked.

    Args:
        context: the run.
        clock: the run's.
        wanted: returns whether this rank has been asked to stop.
        expected: returns whether this rank is to look; None: all ranks are on one host.
    """

    def __init__(
        self,
        context: RunContext,
        clock: Clock,
        wanted: Callable[[], bool],
        expected: Callable[[], bool] | None = None,
    ) -> None:
        plan = context.plan
        self._path = context.folder / f"{context.name('t')}.stop"
        self._is_in_step = plan.synchronous and plan.num_steps_ahead is not None
        self._margin = 2 * (clock.num_steps_ahead + (plan.num_steps_ahead or 0) + 1)
        self._wanted = wanted
        self._expected = expected
        self._last: int | None = None

    def before(self, step: int) -> bool:
        """Return whether to stop before this step, which this rank has not begun."""
        if self._last is None and self._wanted():
            self._announce(step + self._margin)
        if self._last is None:
            self._last = self._read()
        return self._last is not None and (not self._is_in_step or step >= self._last)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _announce(self, step: int) -> None:
        """Write the step unless another rank was first; the file appears with its content."""
        if self._expected is not None:
            group_store().compare_set(self._path.name, "", str(step))
            return
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(str(step))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._path)
        draft.unlink()

    def _read(self) -> int | None:
        if self._expected is not None:
            is_there = self._expected() and group_store().check([self._path.name])
            return int(group_store().get(self._path.name)) if is_there else None
        if not self._path.exists():
            return None
        return int(self._path.read_text())
