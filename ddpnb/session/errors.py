"""How does a cell or a run fail, and how do the errors of several ranks read?  (Notebook side.)

The root cause comes first.
"""

import re
from collections.abc import Collection, Sequence

from ddpnb.protocol.messages import Failure
from ddpnb.protocol.rank_sets import format_ranks, spoken_ranks

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _OneLine(BaseException):
    """An error that IPython shows in one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows (its protocol for exceptions that render themselves)."""
        return [f"{type(self).__name__}: {self}"]


class RankError(Exception):
    """A cell or run failed on some ranks.

    Attributes:
        failures: every rank's failure, the first in time first.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.is_consequence, f.failed_at)))
        super().__init__(sentence(self.failures))

    @property
    def cause(self) -> str:
        """What happened, in a few words that stay right: without what to do about it."""
        first = self.failures[0]
        if first.is_death:
            return f"rank {first.rank} {first.text}"
        said = f" ({first.text.splitlines()[0]})" if first.text.strip() else ""
        where = spoken_ranks([failure.rank for failure in alike(first, self.failures)])
        return f"{first.name} on {where}{said}"

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows (its protocol for exceptions that render themselves)."""
        return render(self.failures)


class CellTimeoutError(_OneLine, TimeoutError):
    """A cell took longer than its ``--timeout`` and was stopped."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the cell took longer than {seconds:g} s and was stopped on all ranks; "
            "their variables are kept"
        )


class CellInterrupt(_OneLine, KeyboardInterrupt):
    """A cell was interrupted, and its ranks have stopped."""

    def __init__(self) -> None:
        super().__init__("the ranks have stopped; their variables are kept")


CellInterrupt.__name__ = "KeyboardInterrupt"  # what Jupyter's clients know


class StuckError(_OneLine, Exception):
    """The ranks of a cell waited for each other without end, and were freed."""

    def __init__(self, why: str, lost: Collection[int] = ()) -> None:
        ending = "They were freed; variables are kept."
        if lost:
            ranks = format_ranks(lost)
            ending = (
                f"Rank {ranks} could not be freed and was ended, its variables with it: "
                f"%ddp_restart --ranks {ranks} brings it back, the other ranks keep theirs."
            )
        super().__init__(f"{why}. {ending}")


def told(error: BaseException) -> str:
    """Return what IPython would show of an error that reaches nobody."""
    lines = error._render_traceback_() if hasattr(error, "_render_traceback_") else [repr(error)]
    return "\n".join(lines)


def sentence(failures: Sequence[Failure]) -> str:
    """Say in one sentence which rank failed first, and how."""
    first = failures[0]
    if first.is_death:
        return (
            f"rank {first.rank} {first.text}; %ddp_restart --ranks {first.rank} brings it back, "
            "the other ranks keep their variables"
        )
    same = alike(first, failures)
    if len(same) > 1:
        return f"ranks {format_ranks(f.rank for f in same)} failed: {first.name}: {first.text}"
    others = "" if len(failures) == 1 else " first"
    return f"rank {first.rank} failed{others}: {first.name}: {first.text}"


def render(failures: Sequence[Failure]) -> list[str]:
    """Return the lines that tell of all failures: the first in full, equal ones once."""
    roots = [failure for failure in failures if not failure.is_consequence] or failures[:1]
    lines: list[str] = []
    told: list[Failure] = []
    for failure in roots:
        if failure in told:
            continue
        same = alike(failure, roots)
        told += same
        if lines:
            lines.append("")
        lines.append(f"RankError: {sentence([failure, *same[1:]])}")
        lines += body(failure)
    if consequences := [f for f in failures if f.is_consequence and f not in roots]:
        lines += ["", *told_consequences(consequences)]
    return lines


def body(failure: Failure) -> list[str]:
    """Return the lines of a failure's traceback, without the last where the headline says it."""
    lines = "\n".join(failure.traceback).splitlines()
    last = f"{failure.name}: {failure.text}".splitlines()
    if [ANSI.sub("", line) for line in lines[-len(last) :]] == last:
        lines = lines[: -len(last)]
    while lines and not ANSI.sub("", lines[-1]).strip():
        lines.pop()
    return lines


def told_consequences(failures: Sequence[Failure]) -> list[str]:
    """Say which ranks failed only because another one did: who waited, and who did not."""
    waited = [failure.rank for failure in failures if failure.was_waiting]
    others = [failure.rank for failure in failures if not failure.was_waiting]
    how = "waiting in a collective for it and stopped: connection closed by peer"
    told = [f"({_who_was(waited)} {how})"] if waited else []
    return told + ([f"({_who_was(others)} stopped with it)"] if others else [])


def _who_was(ranks: Sequence[int]) -> str:
    return f"{spoken_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def alike(failure: Failure, failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures that read the same, without regard to colour."""
    wanted = plain(failure)
    return [other for other in failures if plain(other) == wanted]


def plain(failure: Failure) -> tuple[str, str, str]:
    """Return what makes two failures read the same; calls that do not match are one failure."""
    if failure.breaks_group:
        return failure.name, "", ""
    return failure.name, failure.text, ANSI.sub("", "\n".join(failure.traceback))
