"""How did a process of the cluster end, and what did it write last?  (Notebook side.)"""

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

CRASH = "Fatal Python error"
"""How faulthandler begins what it writes."""
BEFORE_CRASH = 3
"""Lines of a log shown before that."""


class Service(StrEnum):
    """A process of the cluster that is no rank."""

    CONTROLLER = "controller"
    FORK_SERVER = "fork server"


Member = int | Service
"""A process of the cluster: a rank by its number, or a service."""


def member_of(name: str) -> Member:
    """Return the process that the fork server calls so."""
    return int(name) if name.isdigit() else Service(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a process of the cluster ended."""

    member: Member
    code: int | None
    """The exit code; the negative signal number where a signal ended it; None if not known."""


def describe_exit(exit_: Exit) -> str:
    """Say how a process ended: ``"was killed by SIGKILL"``, ``"ended with exit code 1"``."""
    if exit_.code is None:
        return "has ended"
    if exit_.code >= 0:
        return f"ended with exit code {exit_.code}"
    try:
        return f"was killed by {signal.Signals(-exit_.code).name}"
    except ValueError:
        return f"was killed by signal {-exit_.code}"


def spoken(member: Member) -> str:
    """Return a process for a sentence's start: ``"Rank 1"``, ``"The controller"``."""
    return f"Rank {member}" if isinstance(member, int) else f"The {member}"


def log_tail(folder: Path, member: Member, num_lines: int) -> str:
    """Return the last lines that a process wrote to its log, a crash from its beginning.

    With a few lines before a crash: native code often says there why it gives up.

    Args:
        folder: the cluster's run folder.
        member: which process.
        num_lines: how many, at most.
    """
    name = f"rank-{member}" if isinstance(member, int) else member.replace(" ", "")
    try:
        lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    crash = next((n for n, line in enumerate(lines) if line.startswith(CRASH)), -num_lines)
    crash = max(0, crash - BEFORE_CRASH) if crash >= 0 else crash
    return "\n".join(lines[crash:][:num_lines])
