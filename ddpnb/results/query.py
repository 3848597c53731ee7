"""Finds stored runs by name, and tests if a run is still being trained.  Runs in the kernel.

``digits-1`` names a comparison.  ``digits-1/ddp`` names all repeats of ``ddp`` in ``digits-1``, and
``digits-1/ddp#2`` names the second repeat.  ``ddp`` names the repeats of ``ddp`` in the latest
comparison with ``ddp``.  ``mine`` names the latest loop that was logged as ``mine``.
"""

import dataclasses
import itertools
import platform
import re
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.messages import RunHeader, RunSpec
from ddpnb.results.decoding import MAX_NAME, DamageError, decoded, from_fields
from ddpnb.results.run import Status

SAME_SECONDS = 1.5
"""Maximum seconds by which a process's start time may change if the clock is adjusted."""

SILENT_SECONDS = 60.0
"""A run on another host is listed as stopped if its time is older than this number of seconds."""


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


def stored_run(row: sqlite3.Row) -> StoredRun:
    """Return a run without its steps.  If its row is damaged, the status is UNREADABLE."""
    try:
        run = from_fields(StoredRun, dict(row))
    except DamageError as error:
        comparison_id, comparison = (
            decoded(text[:MAX_NAME], str) if isinstance(text, str) else "unreadable"
            for text in (row["comparison_id"], row["comparison"])
        )
        name = f"unreadable-{row['row']}"
        return StoredRun(
            row=row["row"],
            run_id=name,
            comparison_id=comparison_id,
            comparison=comparison,
            name=name,
            status=Status.UNREADABLE,
            detail=str(error),
        )
    why = why_ended(run) if run.status is Status.RUNNING else ""
    return dataclasses.replace(run, status=Status.STOPPED, detail=why) if why else run


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


def writer_of(process: psutil.Process | None = None) -> str:
    """Return the host, id and start time of a process (default: this process)."""
    process = process or psutil.Process()
    return f"{platform.node()} {process.pid} {process.create_time():.2f}"


def is_written(writer: str) -> bool | None:
    """Return whether the kernel that writes a run is alive; None if it is unknown.

    It is unknown for kernels on other hosts.  It is also unknown if the start time differs, because
    the id may belong to another process now, or the clock may have been changed.
    """
    try:
        host, pid, began = writer.rsplit(" ", 2)
        if host != platform.node():
            return None
        found = psutil.Process(int(pid))
        is_same = abs(found.create_time() - float(began)) < SAME_SECONDS
        is_zombie = found.status() == psutil.STATUS_ZOMBIE
    except (ValueError, OverflowError):  # the writer is damaged
        return None
    except psutil.NoSuchProcess:
        return False
    return False if is_zombie else is_same or None


def why_ended(run: StoredRun) -> str:
    """Return why a run that is stored as running has ended; empty if it may still be trained."""
    alive, seen = is_written(run.writer), run.heartbeat or run.created
    if alive is False:
        return "the kernel ended; unsaved steps are lost"
    if alive or abs(time.time() - seen) < SILENT_SECONDS:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(seen))
    return f"no sign of life from {run.writer.rsplit(' ', 2)[0]} since {since}"
