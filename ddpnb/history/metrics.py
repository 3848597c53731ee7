"""The mean step of a strategy, and which ranks were slow or away.  (Kernel.)"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpnb.history.model import RankTotals, RunSnapshot
from ddpnb.history.rows import Floats
from ddpnb.protocol.messages import NO_PARTS, MarkKind, Parts

Absences = Mapping[int, Sequence[tuple[float, float]]]
"""Periods, in training seconds, without each rank; a rank that was never absent is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The mean step of a strategy; seconds of one worker."""

    parts: Parts = NO_PARTS
    num_bytes_sent: float = math.nan
    """What one worker sent in one step."""

    @property
    def seconds(self) -> float:
        """The whole step; hidden communication takes no time of its own."""
        return sum(self.parts) - self.parts.hidden

    @property
    def is_known(self) -> bool:
        """Whether the ranks reported any part."""
        return self.seconds > 0

    @property
    def exposed_share(self) -> float:
        """Share of the step spent on exchanging tensors or waiting for other ranks."""
        if not self.is_known:
            return math.nan
        return (self.parts.communication + self.parts.waiting) / self.seconds


def step_split(runs: Sequence[RunSnapshot]) -> StepSplit:
    """Return the mean step over all ranks and repeats."""
    ranks = [rank for run in runs for rank in run.ranks if rank.num_steps]
    num_steps = sum(rank.num_steps for rank in ranks)
    if num_steps == 0:
        return StepSplit()
    totals = np.sum([rank.parts for rank in ranks], axis=0) / num_steps
    sent = sum(rank.num_bytes_sent for rank in ranks)
    return StepSplit(
        parts=Parts(*totals.tolist()), num_bytes_sent=sent / num_steps if sent else math.nan
    )


def slowness(ranks: Sequence[RankTotals]) -> dict[int, float]:
    """Return each rank's own time of a step over that of the fastest rank."""
    means = {rank.rank: float(np.nanmedian(rank.track.mean)) for rank in ranks if len(rank.track)}
    fastest = min(means.values(), default=0.0)
    return {rank: mean / fastest for rank, mean in means.items()} if fastest > 0 else {}


def absences(run: RunSnapshot) -> Absences:
    """Return when ranks that died were absent; one that is still absent is so to infinity."""
    periods: dict[int, list[tuple[float, float]]] = {}
    steps = {rank.rank: rank.track.seconds for rank in run.ranks}
    for mark in sorted(run.marks, key=lambda mark: mark.seconds):
        own = periods.get(mark.rank, [])
        is_absent = bool(own) and math.isinf(own[-1][1])
        if mark.kind in (MarkKind.KILLED, MarkKind.DIED) and not is_absent:
            before = [at for at in steps.get(mark.rank, ()) if at <= mark.seconds]
            periods[mark.rank] = [*own, (max(before, default=0.0), math.inf)]
        elif mark.kind is MarkKind.CAME_BACK and is_absent:
            own[-1] = _longest_pause(steps.get(mark.rank, np.empty(0)), own[-1][0], mark.seconds)
    return periods


def _longest_pause(at_seconds: Floats, begin: float, end: float) -> tuple[float, float]:
    """Return the longest time between two steps of a rank, as marks may come a little late."""
    within = at_seconds[(begin < at_seconds) & (at_seconds < end)]
    at = np.concatenate([[begin], within, [end]])
    longest = int(np.argmax(np.diff(at)))
    return float(at[longest]), float(at[longest + 1])
