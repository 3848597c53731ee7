"""Timeouts of calls and of their supervision (kernel)."""

from dataclasses import dataclass, fields

START_TIMEOUT_SECONDS = 120.0
CALL_TIMEOUT_SECONDS = 30.0
"""How long a call may take that only this package makes."""
SUBSCRIBE_ATTEMPTS = 6
SUBSCRIBE_ATTEMPT_SECONDS = 0.5
"""How often and how long an attached kernel checks that the ranks' output reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """When a running call is polled, named, freed and killed."""

    tick_seconds: float = 0.05
    """The longest wait for a call's next event; the display is drawn in between."""
    free_after_seconds: float = 0.3
    """How long ranks may still run after one has failed: they may be about to fail too."""
    free_checks_after_seconds: float = 5.0
    """The same for the check before a training, where freeing costs more: the process group."""
    name_after_seconds: float = 0.8
    """When a failure is shown while other ranks still run: they compute, or the machine is busy."""
    abort_after_seconds: float = 0.3
    """How long an interrupted rank may take before it is freed from its collective."""
    interrupt_again_after_seconds: float = 1.2
    """How long a freed rank may take before it is interrupted again.

    It may still have been in the cell before, or have caught the first interrupt.
    """
    kill_after_seconds: float = 10.0
    """How long an interrupted and freed rank may take before it is killed."""
    poll_seconds: float = 0.8
    """How often the ranks report where they are; twice a second cost a training 1 %."""
    stuck_after_seconds: float = 2.0
    """How long ranks must have waited for each other, idle, before the call counts as stuck."""
    longest_gap_seconds: float = 1.0
    """The most that the time between two reports counts towards that.

    A longer gap means that this kernel or the ranks were stopped, as when a laptop sleeps.
    """
    stopped_poll_seconds: float = 1.0
    """How often the running ranks' processes are checked for SIGSTOP."""

    def divided_by(self, factor: float) -> "Timeouts":
        """Return the same timeouts, each shorter by ``factor``."""
        return Timeouts(**{each.name: getattr(self, each.name) / factor for each in fields(self)})
