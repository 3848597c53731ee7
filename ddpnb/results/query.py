"""Finds stored runs by name.  Runs in the kernel.

``digits-1`` names a comparison.  ``digits-1/ddp`` names all repeats of ``ddp`` in ``digits-1``, and
``digits-1/ddp#2`` names the second repeat.  ``ddp`` names the repeats of ``ddp`` in the latest
comparison with ``ddp``.  ``mine`` names the latest loop that was logged as ``mine``.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.messages import RunHeader, RunSpec
from ddpnb.results.run import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The facts about a stored run that the list of runs shows, without the run's steps."""

    row: int = 0
    """Number of the run's row in the store.  Rows are in the order in which runs began."""
    run_id: str
    comparison_id: str
    comparison: str
    name: str
    repeat: int = 0
    created: float = 0.0
    task: str = ""
    status: Status = Status.FINISHED
    detail: str = ""
    num_events: int = 0
    num_ranks: int = 0
    """Number of ranks that have sent events."""
    spec: RunSpec | None = None
    header: RunHeader | None = None
    writer: str = ""
    """Host, process id and start time of the kernel that records the run."""
    heartbeat: float | None = None
    """The last time at which the run was written, in seconds since 1970."""

    @property
    def num_workers(self) -> int:
        """Number of workers, or number of ranks with a hand-written loop; 0 if unknown."""
        if self.header is not None:
            return self.header.num_workers
        return self.num_ranks if self.spec is None else 0

    @property
    def address(self) -> str:
        """The unique name of the run, such as ``digits-1/ddp#1``."""
        return f"{self.comparison}/{self.name}#{self.repeat + 1}"


def resolve(address: str, runs: Sequence[StoredRun]) -> tuple[StoredRun, ...]:
    """Return the runs that ``address`` names, oldest first.

    Args:
        address: a name as described above, or the id of a comparison or run.
        runs: all stored runs, oldest first.

    Raises:
        UserError: no run has that name; the message suggests the closest names.
    """
    found = (
        [run for run in runs if address in (run.comparison, run.comparison_id, run.run_id)]
        or _latest(address, runs)
        or [run for run in runs if address in (f"{run.comparison}/{run.name}", run.address)]
    )
    if not found:
        near = closest(address, all_names(runs))
        hint = f"did you mean {near}?" if near else "%ddp_runs lists all stored runs."
        raise UserError(f"There is no run {address!r}: {hint}")
    return tuple(found)


def all_names(runs: Sequence[StoredRun]) -> tuple[str, ...]:
    """Return every name that ``resolve`` accepts, starting with the shortest kind of name."""
    latest_first = runs[::-1]
    names = [run.name for run in latest_first]
    names += [run.comparison for run in latest_first]
    names += [f"{run.comparison}/{run.name}" for run in latest_first]
    names += [run.address for run in latest_first if run.repeat > 0]
    return tuple(dict.fromkeys(names))


def check_name(name: str) -> None:
    """Raise a UserError if the user's name for a comparison is not valid."""
    if name in STRATEGIES:
        raise UserError(f"{name!r} is a strategy. Choose another name.")
    if not re.fullmatch(r"\w[\w.+-]{0,59}", name):
        raise UserError(
            f"{name!r} cannot be a name. Use up to 60 letters, digits, '-', '_', '.' or '+'."
        )


def numbered(name: str, taken: Collection[str]) -> str:
    """Return ``name`` with the first number that makes the name new, such as ``digits-2``."""
    names = (f"{name}-{number}" for number in itertools.count(1))
    return next(each for each in names if each not in taken)


def _latest(name: str, runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the repeats of ``name`` in the latest comparison that trained ``name``."""
    called = [run for run in runs if run.name == name]
    if not called:
        return []
    return [run for run in called if run.comparison_id == called[-1].comparison_id]


def matching(
    runs: Sequence[StoredRun], text: str = "", last: int | None = None
) -> tuple[StoredRun, ...]:
    """Return the runs to list, in the order of ``runs``.

    Args:
        runs: all stored runs.
        text: list only runs with this string in the name, task or state; case does not matter.
        last: list at most this number of lines, newest first.  Repeats of a strategy share a line.
    """
    if last is not None and last < 1:
        raise UserError(f"--last must be at least 1, not {last}.")
    states = [f"{run.comparison}/{run.name} {run.task} {run.status} {run.detail}" for run in runs]
    pairs = zip(runs, states, strict=True)
    found = [run for run, state in pairs if text.lower() in state.lower()]
    lines = list(dict.fromkeys((run.comparison_id, run.name) for run in found[::-1]))[:last]
    return tuple(run for run in found if (run.comparison_id, run.name) in lines)
