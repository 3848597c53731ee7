"""How far will the longest run go?  Axes that end there need not be drawn anew as it grows."""

from ddpnb.notebook.record.comparison import Comparison
from ddpnb.notebook.record.runs import RunSnapshot
from ddpnb.notebook.show.axes import round_up

LEAST_SHARE = 0.02
"""Of a run, from which on its length is estimated."""

SLACK = 1.1
"""How much longer than estimated the axis is at first: rates vary."""

LONGEST = 1.7
"""How many times too long it may be before it is cut."""


def planned_samples(comparison: Comparison) -> int:
    """Return up to which sample the longest run will see; of runs that are over, has seen."""
    known = [(run, run.header) for run in comparison.runs if run.header is not None]
    if any(run.is_running for run, _ in known):
        return max(header.num_samples_before + header.num_samples for _, header in known)
    return max((run.num_samples_before + run.digest.num_samples for run, _ in known), default=0)


def planned_seconds(comparison: Comparison, shown: float) -> float:
    """Return where an axis of seconds ends, at a round number.

    Args:
        comparison: what is shown.
        shown: where the axis has ended so far; kept while it fits.
    """
    longest = max(map(_seconds_of, comparison.runs), default=0.0)
    if not any(run.is_running for run in comparison.runs):
        return round_up(longest)
    if longest <= shown <= LONGEST * longest:
        return shown
    return round_up(SLACK * longest)


def _seconds_of(run: RunSnapshot) -> float:
    """Return how long a run has taken, or as far as can be told, will have taken."""
    seconds = run.digest.seconds
    if not run.is_running or run.header is None or run.header.num_samples == 0:
        return seconds
    share = run.digest.num_samples / run.header.num_samples
    return seconds / share if LEAST_SHARE <= share < 1 else seconds
