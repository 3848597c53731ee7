"""What may be claimed of two strategies: a ratio over the repeats, with its interval.  (Kernel.)

Within a repeat all strategies have the same seed, so two of them are compared pair by pair: in each
repeat r the ratio of their numbers, x_r.  Over n repeats, with m comparisons in one sentence:

    exp( mean(log x)  +-  t(1 - 0.05 / 2m, n - 1) * sd(log x) / sqrt(n) )

the geometric mean and its 95 % interval: Student's t, widened by Bonferroni so that all m intervals
together hold in 95 % of sentences.  A difference is claimed where the interval excludes 1 and the
ratio differs from 1 by ``SMALLEST_EFFECT`` or more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ddpnb.history.model import Status
from ddpnb.history.summary import StrategyKey, StrategySummary, log_ratios
from ddpnb.protocol.catalogue import BASELINE, CEILING

LEVEL = 0.95
"""Joint confidence level of all intervals in a sentence."""

SMALLEST_EFFECT = 0.02
"""The smallest difference that is worth words."""

FEWEST_REPEATS = 3
"""With two repeats an interval has one degree of freedom: 12.7 standard errors to each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A number of one strategy over that of another."""

    middle: float = math.nan
    """The geometric mean over the repeats."""
    low: float = math.nan
    """The ends of the interval; NaN of fewer repeats than ``FEWEST_REPEATS``."""
    high: float = math.nan
    num_repeats: int = 0
    """Repeats in which both have the number."""

    @property
    def has_interval(self) -> bool:
        """Whether there are enough repeats for one."""
        return self.num_repeats >= FEWEST_REPEATS

    @property
    def is_claim(self) -> bool:
        """Whether a difference is shown, and is worth words."""
        has_effect = abs(math.log(self.middle)) >= math.log1p(SMALLEST_EFFECT)
        return self.has_interval and (self.low > 1 or self.high < 1) and has_effect


def ratios_of(
    summaries: Sequence[StrategySummary],
) -> tuple[StrategySummary, dict[StrategyKey, Ratio]] | None:
    """Return ``single``, or else the first one, and the others' samples/s over those; or None.

    The ceiling is no rival where there are others, and emulated strategies are none, as their
    speeds say nothing.  Runs of several comparisons may have trained different models.
    """
    done = [s for s in summaries if s.status is Status.FINISHED and s.rates]
    if len(done) < 2 or len({s.comparison for s in done}) > 1:
        return None
    rivals = [s for s in done if not s.is_emulated]
    if not rivals:
        return None
    reference = next((s for s in rivals if s.name == BASELINE), rivals[0])
    others = [s for s in rivals if s is not reference]
    others = [s for s in others if s.name != CEILING] or others
    return reference, {s.key: ratio(s.rates, reference.rates, len(others)) for s in others}


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float], num_claims: int = 1) -> Ratio:
    """Return the ratio of two numbers that are known in some repeats.

    Args:
        ours: by repeat; all greater than 0.
        theirs: likewise.
        num_claims: how many comparisons are made in one sentence.
    """
    logs = log_ratios(ours, theirs)
    if not logs:
        return Ratio()
    middle, num = fmean(logs), len(logs)
    if num < FEWEST_REPEATS:
        return Ratio(middle=math.exp(middle), num_repeats=num)
    from scipy.special import stdtrit  # noqa: PLC0415  takes 0.1 s

    quantile = float(stdtrit(num - 1, 1 - (1 - LEVEL) / 2 / num_claims))  # Student's t
    half = quantile * stdev(logs) / math.sqrt(num)
    return Ratio(
        middle=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        num_repeats=num,
    )
