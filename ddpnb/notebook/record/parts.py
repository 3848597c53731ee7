"""Where did the time of a strategy's steps go, and when did a rank make none?  (Notebook side.)

Pure arithmetic on what the ranks told.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpnb.notebook.record.digest import RankDigest
from ddpnb.notebook.record.pyramid import Floats
from ddpnb.notebook.record.runs import RunSnapshot
from ddpnb.wire import NO_PARTS, MarkKind, Parts

Absences = Mapping[int, Sequence[tuple[float, float]]]
"""From when to when each rank was away; none of a rank that never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The mean step of a strategy; seconds of one worker."""

    parts: Parts = NO_PARTS
    num_bytes_sent: float = math.nan
    """What one worker handed over in one step."""

    @property
    def seconds(self) -> float:
        """The whole step; what is hidden takes no time of its own."""
        return sum(self.parts) - self.parts.hidden

    @property
    def is_known(self) -> bool:
        """Whether the ranks told of any part."""
        return self.seconds > 0

    @property
    def exposed_share(self) -> float:
        """Share of the step that went into exchanging tensors or waiting for other ranks."""
        if not self.is_known:
            return math.nan
        return (self.parts.communication + self.parts.waiting) / self.seconds


def step_split(runs: Sequence[RunSnapshot]) -> StepSplit:
    """Return the mean step over all ranks and repeats."""
    ranks = [rank for run in runs for rank in run.digest.ranks if rank.num_steps]
    num_steps = sum(rank.num_steps for rank in ranks)
    if num_steps == 0:
        return StepSplit()
    totals = np.sum([rank.parts for rank in ranks], axis=0) / num_steps
    sent = sum(rank.num_bytes_sent for rank in ranks)
    return StepSplit(
        parts=Parts(*totals.tolist()), num_bytes_sent=sent / num_steps if sent else math.nan
    )


def slowness(ranks: Sequence[RankDigest]) -> dict[int, float]:
    """Return how many times as long as the fastest rank each takes for its own part of a step."""
    means = {
        rank.rank: float(np.nanmedian(rank.own_seconds)) for rank in ranks if len(rank.own_seconds)
    }
    fastest = min(means.values(), default=0.0)
    return {rank: mean / fastest for rank, mean in means.items()} if fastest > 0 else {}


def absences(run: RunSnapshot) -> Absences:
    """Return in which training seconds ranks that have died were away; to infinity: still."""
    away: dict[int, list[tuple[float, float]]] = {}
    steps = {rank.rank: rank.at_seconds for rank in run.digest.ranks}
    for mark in sorted(run.marks, key=lambda mark: mark.seconds):
        own = away.get(mark.rank, [])
        is_away = bool(own) and math.isinf(own[-1][1])
        if mark.kind in (MarkKind.KILLED, MarkKind.DIED) and not is_away:
            before = [at for at in steps.get(mark.rank, ()) if at <= mark.seconds]
            away[mark.rank] = [*own, (max(before, default=0.0), math.inf)]
        elif mark.kind is MarkKind.CAME_BACK and is_away:
            own[-1] = _longest_pause(steps.get(mark.rank, np.empty(0)), own[-1][0], mark.seconds)
    return away


def _longest_pause(at_seconds: Floats, begin: float, end: float) -> tuple[float, float]:
    """Return between which steps of a rank most time passed: marks may be told a little late."""
    within = at_seconds[(begin < at_seconds) & (at_seconds < end)]
    at = np.concatenate([[begin], within, [end]])
    longest = int(np.argmax(np.diff(at)))
    return float(at[longest]), float(at[longest + 1])
