"""Shows failures of ranks: root cause first, equal failures once.  Runs in the kernel."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from IPython.core.getipython import get_ipython

from ddpnb.cluster.interrupts import Interrupted
from ddpnb.cluster.supervision import Watch
from ddpnb.cluster.wording import deaths, say
from ddpnb.protocol.cell_messages import CellReport, Failure, StaleVariable
from ddpnb.protocol.errors import OneLine, UserError
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.reports.notebook import warn

Remedy = Callable[[Collection[int]], str]
"""Function that says how to continue now, after the given ranks have died."""
MISSING = re.compile(r"name '(\w+)' is not defined")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class RankError(Exception):
    """A cell or run failed on some ranks.

    ``failures`` lists the root causes first and then the consequences, both in order of time.
    ``remedy`` is called when the error is shown, because dead ranks may be restarted until then.
    """

    def __init__(self, failures: Sequence[Failure], remedy: Remedy) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.is_consequence, f.failed_at)))
        self._remedy = remedy
        super().__init__(self.failures)

    def __str__(self) -> str:
        """Return what failed first, and how to continue now."""
        return summarize(self.failures, self._remedy)

    @property
    def cause(self) -> str:
        """The cause in a few words and without advice, to be stored with the run."""
        first = self.failures[0]
        if first.is_death:
            return f"rank {first.rank} {first.text}"
        text = f" ({first.text.splitlines()[0]})" if first.text.strip() else ""
        ranks = [failure.rank for failure in _identical_to(first, self.failures)]
        return f"{first.name} on {spoken_ranks(ranks)}{text}"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows (its protocol for custom tracebacks)."""
        return render_failures(self.failures, self._remedy)


class Ended(OneLine):
    """A call was ended.  ``kept`` is called when the error is shown, as ``remedy`` above."""

    def __init__(self, text: str, kept: Callable[[], str]) -> None:
        super().__init__(text)
        self._kept = kept

    def __str__(self) -> str:
        """Return what has ended, and what is kept now."""
        return f"{self.args[0]} {self._kept()}"


class CellTimeoutError(Ended, TimeoutError):
    """A cell took longer than its ``--timeout`` and was stopped."""

    def __init__(self, seconds: float, where: str, kept: Callable[[], str]) -> None:
        text = f"The cell took longer than {seconds:g} s and was stopped on all ranks{where}."
        super().__init__(text, kept)


class CellInterrupt(Ended, Interrupted):
    """A cell or run was interrupted, and its ranks have stopped."""

    def __init__(self, kept: Callable[[], str], where: str = "") -> None:
        super().__init__(f"The ranks have stopped{where}.", kept)


CellInterrupt.__name__ = Interrupted.__name__


class HangError(Ended, Exception):
    """The ranks waited for each other without end, and ddpnb released or killed them."""

    def __init__(self, watch: Watch) -> None:
        how = "killed" if watch.lost else "released"
        super().__init__(f"{watch.hang}. ddpnb {how} the waiting ranks.", kept(watch))


def error_of(watch: Watch) -> HangError | RankError | UserError | None:
    """Return the error of a call that has ended, or None if the call succeeded."""
    cluster = watch.cluster
    if cluster.is_over and watch.lost:
        return UserError("The cluster was stopped before the ranks had finished.")
    if cluster.lost is not None and (watch.lost or watch.failures):
        return UserError(cluster.remedy())
    if watch.hang and watch.lost.keys() <= watch.killed:
        return HangError(watch)
    failures = failures_of(watch)
    return RankError(failures, cluster.remedy) if failures else None


def failures_of(watch: Watch) -> list[Failure]:
    """Return the failures of a call, including the deaths of ranks."""
    exits = watch.cluster.exits
    has_broken = any(failure.breaks_group for failure in watch.failures)
    died = watch.lost | (watch.call.lost if has_broken else {})
    deaths = [
        Failure(
            rank=rank,
            name="RankLost",
            text=cause,
            traceback=(exits[rank].last_words if rank in exits else "",),
            failed_at=0.0,
            is_consequence=rank in watch.killed,
            is_death=True,
        )
        for rank, cause in died.items()
    ]
    return [*watch.failures, *deaths]


def kept(watch: Watch) -> Callable[[], str]:
    """Return a function that says that variables are kept, except on ranks that have died."""
    cluster = watch.cluster

    def now() -> str:
        died = () if cluster.is_over else sorted(watch.call.lost)
        if died:
            return f"However, {say(died, 'has')} ended. {cluster.remedy(died)}"
        return "All variables are kept." if cluster.lost is None else cluster.remedy()

    return now


def where_stopped(returned: Mapping[int, Any]) -> str:
    """Return where ranks stopped in a cell: ``" (ranks 0,2 in line 4, rank 1 had finished)"``."""
    places: dict[str, list[int]] = {}
    for rank, report in sorted(returned.items()):
        failure = report.failure if isinstance(report, CellReport) else report
        if failure is None:
            place = "had finished"
        elif failure.is_consequence or failure.name == KeyboardInterrupt.__name__:
            place = f"in line {failure.line}" if failure.line else ""
        else:
            place = f"had failed: {failure.name}"
        places.setdefault(place, []).append(rank)
    places.pop("", None)
    if set(places) <= {"had finished"}:
        return ""
    return f" ({', '.join(f'{spoken_ranks(ranks)} {place}' for place, ranks in places.items())})"


def render_error(error: BaseException) -> str:
    """Return an error as IPython would show it if a cell had raised the error."""
    lines = error._render_traceback_() if hasattr(error, "_render_traceback_") else [repr(error)]
    return "\n".join(lines)


def _missing_here(failure: Failure) -> str:
    """Return advice on copying a variable to the ranks, if only the notebook has the variable."""
    missing = MISSING.match(failure.text) if failure.name == NameError.__name__ else None
    shell = get_ipython()
    if missing is None or shell is None or missing[1] not in shell.user_ns:
        return ""
    return f". Run %ddp_push {missing[1]} to copy {missing[1]} from the notebook to the ranks"


def summarize(failures: Sequence[Failure], remedy: Remedy) -> str:
    """Return a sentence that names the rank that failed first, and the error on this rank."""
    first = failures[0]
    same = _identical_to(first, failures)
    if first.is_death:
        return _deaths(same, remedy)
    ranks = spoken_ranks([failure.rank for failure in same])
    others = " first" if len(same) == 1 < len(failures) else ""
    return f"{ranks} failed{others}: {first.name}: {first.text}{_missing_here(first)}"


def _deaths(dead: Sequence[Failure], remedy: Remedy) -> str:
    """Return sentences that say how ranks died, with the command that restarts the ranks."""
    said = deaths({failure.rank: failure.text for failure in dead})
    return f"{said}. {remedy([failure.rank for failure in dead])}"


def render_failures(failures: Sequence[Failure], remedy: Remedy) -> list[str]:
    """Return the lines that show all failures: identical failures once, consequences last."""
    roots = [failure for failure in failures if not failure.is_consequence] or failures[:1]
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in roots:
        groups.setdefault(_identity(failure), []).append(failure)
    lines: list[str] = []
    for same in groups.values():
        lines += [""] if lines else []
        lines.append(f"RankError: {summarize(same, remedy)}")
        by_log = {each.traceback: each for each in same}  # each dead rank has its own log
        for each in by_log.values() if same[0].is_death else same[:1]:
            lines += _traceback_lines(each)
    if consequences := [f for f in failures if f.is_consequence and f not in roots]:
        lines += ["", *_consequence_lines(consequences, remedy)]
    return lines


def _traceback_lines(failure: Failure) -> list[str]:
    """Return a failure's traceback, without the last line if that line repeats the headline."""
    lines = "\n".join(failure.traceback).splitlines()
    last = f"{failure.name}: {failure.text}".splitlines()
    if [ANSI.sub("", line) for line in lines[-len(last) :]] == last:
        lines = lines[: -len(last)]
    while lines and not ANSI.sub("", lines[-1]).strip():
        lines.pop()
    return lines


def _consequence_lines(failures: Sequence[Failure], remedy: Remedy) -> list[str]:
    """Return the lines about ranks that failed only because another rank had failed."""
    dead = [failure.rank for failure in failures if failure.is_death]
    waited = [f.rank for f in failures if f.was_waiting and not f.is_death]
    others = [failure.rank for failure in failures if not failure.was_waiting]
    how = "released from a collective that needs the failed rank"
    lines = [f"({say(waited, 'was')} {how})"] if waited else []
    killed = "killed, because ddpnb could not release a wait for the failed rank"
    lines += [f"({say(dead, 'was')} {killed}. {remedy(dead)})"] if dead else []
    why = "stopped because another rank had failed"
    return lines + ([f"({say(others, 'was')} {why})"] if others else [])


def _identical_to(failure: Failure, failures: Sequence[Failure]) -> list[Failure]:
    """Return ``failure`` and all failures that have the same ``_identity``."""
    wanted = _identity(failure)
    return [other for other in failures if _identity(other) == wanted]


def _identity(failure: Failure) -> tuple[str, str, str]:
    """Return a key of a failure.  If failures have equal keys, ddpnb shows only one of them."""
    if failure.breaks_group or failure.is_death:
        return failure.name, "", ""
    return failure.name, failure.text, ANSI.sub("", "\n".join(failure.traceback))


def warn_stale(stale: Mapping[StaleVariable, Sequence[int]]) -> None:
    """Warn about each variable on the ranks that belongs to an aborted process group."""
    for variable, ranks in stale.items():
        warn(variable.sentence(f" on {spoken_ranks(ranks)}"))
