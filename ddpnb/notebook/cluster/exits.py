"""How did a process of the cluster end, in words?  (Notebook side.)"""

import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a process of the cluster ended."""

    name: str
    """``"controller"``, ``"fork server"``, or the rank's number."""
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


def spoken(name: str) -> str:
    """Return a process's name for a sentence's start: ``"Rank 1"``, ``"The controller"``."""
    return f"Rank {name}" if name.isdigit() else f"The {name}"
