"""How all ranks stop before the same step, without a message per step (ranks).

The first rank that is asked to stop chooses the step before which all ranks stop.  It writes the
number to a file in the folder that all ranks of the host share.  Each rank looks for the file
before each step, which takes microseconds.

A synchronous step ends on no rank before every rank has begun it.  So a rank is at most
``num_steps_ahead`` steps ahead of the writer (0 on a CPU, a few on a GPU, see ``timing``).  Within
twice as many steps, every rank has looked for the file at least once.  No rank is past the chosen
step by then, and none misses the file before it is removed.  Asynchronous workers do not wait for
each other; each stops as soon as it sees the file.

Ranks of another host do not see the file: there a stop needs the group to be aborted.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


class Stop:
    """The step before which all ranks of a run stop.

    Args:
        folder: shared by all ranks of the host.
        name: of the file; no two trainings share it.
        synchronous: whether the workers make step k together.
        num_steps_ahead: steps that a rank may be ahead of another.
        wanted: returns whether this rank has been asked to stop.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        synchronous: bool,
        num_steps_ahead: int,
        wanted: Callable[[], bool],
    ) -> None:
        self._path = folder / f"{name}.stop"
        self._margin = 2 * (num_steps_ahead + 1) if synchronous else 0
        self._wanted = wanted
        self._last: int | None = None

    def before(self, step: int) -> bool:
        """Return whether to stop before this step, which this rank has not begun."""
        if self._last is None and self._wanted():
            self._announce(step + self._margin)
        if self._last is None:
            self._last = self._read()
        return self._last is not None and step >= self._last

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _announce(self, step: int) -> None:
        """Write the step unless another rank was first; the file appears with its content."""
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(str(step))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._path)
        draft.unlink()

    def _read(self) -> int | None:
        if not self._path.exists():
            return None
        return int(self._path.read_text())
