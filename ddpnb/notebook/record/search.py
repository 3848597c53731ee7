"""Which of the stored runs are asked for?  (Notebook side.)"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddpnb.errors import UserError
from ddpnb.notebook.record.names import StoredRun

UNIT_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a run must be to be listed; what is left out excludes nothing."""

    text: str = ""
    """Stands in its name, strategy, task or state; capitals do not matter."""
    task: str = ""
    """As it was written, or without its options."""
    strategy: str = ""
    """Likewise."""
    since: str = ""
    """How long ago it may have begun: ``"90m"``, ``"12h"``, ``"2d"``, ``"1w"``."""
    last: int | None = None
    """How many lines are listed, the newest; repeats of one strategy are one line."""

    def __post_init__(self) -> None:
        if self.since:
            seconds_of(self.since)
        if self.last is not None and self.last < 1:
            raise UserError(f"--last must be at least 1, not {self.last}.")

    def among(self, runs: Sequence[StoredRun]) -> tuple[StoredRun, ...]:
        """Return those of the runs that are asked for, in their order."""
        begun = time.time() - seconds_of(self.since) if self.since else 0.0
        found = [run for run in runs if run.created >= begun and self._fits(run)]
        if self.last is None:
            return tuple(found)
        newest_first = sorted(found, key=lambda run: -run.created)
        lines = list(dict.fromkeys((run.comparison_id, run.name) for run in newest_first))
        kept = set(lines[: self.last])
        return tuple(run for run in found if (run.comparison_id, run.name) in kept)

    def _fits(self, run: StoredRun) -> bool:
        told = f"{run.comparison}/{run.name} {run.task} {run.status} {run.detail}".lower()
        return (
            self.text.lower() in told
            and self.task in ("", run.task, run.task.split(":")[0])
            and self.strategy in ("", run.name, run.name.split(":")[0])
        )


def seconds_of(span: str) -> float:
    """Return the seconds of ``"90m"``, ``"12h"``, ``"2d"`` or ``"1w"``.

    Raises:
        UserError: it is no such span.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", span)
    if found is None:
        raise UserError(f"Write --since as 90m, 12h, 2d or 1w, not {span}.")
    return float(found[1]) * UNIT_SECONDS[found[2]]
