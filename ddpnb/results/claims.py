"""Tests if two strategies differ: computes their mean ratio and its interval.  Runs in the kernel.

In one repeat all strategies have the same seed, so strategies are compared repeat by repeat: x_r is
the ratio of two values in repeat r.  For n repeats and m comparisons in one sentence:

    exp( mean(log x)  +-  t(1 - 0.05 / 2m, n - 1) * sd(log x) / sqrt(n) )

The result is the geometric mean and an interval from Student's t.  The interval is so wide that all
m intervals are right in 95 % of sentences (Bonferroni).  A difference is claimed if the interval
excludes 1 and the ratio differs from 1 by at least ``SMALLEST_EFFECT``.

``accuracies_differ`` tests if two accuracies differ by more than chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev

from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.results.model import Status
from ddpnb.results.summary import StrategyKey, StrategySummary, log_ratios

LEVEL = 0.95
"""Joint confidence level of all intervals in a sentence."""

SMALLEST_EFFECT = 0.02
"""The smallest relative difference that a sentence mentions."""

FEWEST_REPEATS = 3
"""Minimum number of repeats for an interval.  Two repeats would give +- 12.7 standard errors."""

MOST_REPEATS = 30
"""Maximum number of repeats that ddpnb recommends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A value of one strategy, such as its speed, divided by the same value of another strategy."""

    middle: float = math.nan
    """The geometric mean over the repeats."""
    low: float = math.nan
    """Lower end of the interval, or the smaller ratio of two repeats; NaN if unknown.  For one
    repeat, the numerator's slowest tenth, divided by the denominator's fastest tenth."""
    high: float = math.nan
    num_repeats: int = 0
    """Number of repeats in which both strategies have this value."""
    deviation: float = math.nan
    """Standard deviation of the ratio's logarithm over the repeats."""
    num_claims: int = 1
    """Number of comparisons in the same sentence."""

    @property
    def has_interval(self) -> bool:
        """True if there are enough repeats for an interval."""
        return self.num_repeats >= FEWEST_REPEATS

    @property
    def excludes_one(self) -> bool:
        """True if the whole interval is above 1 or below 1."""
        return self.low > 1 or self.high < 1

    @property
    def is_claim(self) -> bool:
        """True if the interval shows a difference of at least ``SMALLEST_EFFECT``."""
        return self.has_interval and self.excludes_one and self._has_effect(self.middle)

    @property
    def is_small(self) -> bool:
        """True if the interval shows that any difference is small."""
        is_narrow = not (self._has_effect(self.low) or self._has_effect(self.high))
        return self.has_interval and not self.is_claim and (self.excludes_one or is_narrow)

    def _has_effect(self, ratio: float) -> bool:
        return abs(math.log(ratio)) >= math.log1p(SMALLEST_EFFECT)

    @property
    def num_repeats_needed(self) -> int:
        """Number of repeats that would show this ratio; 0 if unknown or above ``MOST_REPEATS``."""
        if not (self.has_interval and self._has_effect(self.middle)):
            return 0
        half = [
            (num, self.deviation * _quantile(num, self.num_claims) / math.sqrt(num))
            for num in range(self.num_repeats + 1, MOST_REPEATS + 1)
        ]
        return next((num for num, each in half if each < abs(math.log(self.middle))), 0)


def ratios_of(
    summaries: Sequence[StrategySummary],
) -> tuple[StrategySummary, dict[StrategyKey, Ratio]] | None:
    """Return the reference strategy, and each other strategy's speed relative to the reference.

    The reference is ``single``, or the first strategy if there is no ``single``.  The ceiling
    counts only if it is the only other strategy.  Emulated strategies never count.  The result is
    None if there are fewer than two strategies.  Several comparisons also give None, because their
    models may differ.
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
    found = {s.key: ratio(s.rates, reference.rates, len(others)) for s in others}
    return reference, {s.key: _within_runs(found[s.key], s, reference) for s in others}


def _within_runs(found: Ratio, ours: StrategySummary, theirs: StrategySummary) -> Ratio:
    """Return the ratio.  If there is one repeat, compute the range from the tenths of its runs."""
    one, other = ours.tenths, theirs.tenths
    if found.num_repeats != 1 or not one or not other:
        return found
    return replace(found, low=min(one) / max(other), high=max(one) / min(other))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float], num_claims: int = 1) -> Ratio:
    """Return the mean ratio over the repeats in which both strategies have a value.

    Args:
        ours: the numerator in each repeat, always greater than 0.
        theirs: the denominator in each repeat, always greater than 0.
        num_claims: number of comparisons in one sentence.
    """
    logs = log_ratios(ours, theirs)
    if not logs:
        return Ratio()
    middle, num = fmean(logs), len(logs)
    if num < FEWEST_REPEATS:
        low, high = (min(logs), max(logs)) if num > 1 else (math.nan, math.nan)
        return Ratio(
            middle=math.exp(middle), low=math.exp(low), high=math.exp(high), num_repeats=num
        )
    deviation = stdev(logs)
    half = _quantile(num, num_claims) * deviation / math.sqrt(num)
    return Ratio(
        middle=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        num_repeats=num,
        deviation=deviation,
        num_claims=num_claims,
    )


def _quantile(num_repeats: int, num_claims: int) -> float:
    """Return the quantile of Student's t for ``num_claims`` intervals at the joint ``LEVEL``."""
    from scipy.special import stdtrit  # noqa: PLC0415  takes 0.1 s

    return float(stdtrit(num_repeats - 1, 1 - (1 - LEVEL) / 2 / num_claims))


def standard_error(share: float, num_samples: int) -> float:
    """Return the standard error of an accuracy that was measured on ``num_samples`` samples."""
    return math.sqrt(share * (1 - share) / num_samples)


def accuracies_differ(shares: Sequence[float], num_samples: int) -> bool:
    """Return True if the highest and the lowest accuracy differ by more than chance.

    This is the 95 % test of two proportions with a common standard error, corrected for all pairs
    (Bonferroni).  Models often err on the same samples, so the assumed error is too large.  The
    test therefore claims too few differences, not too many.
    """
    num_pairs = math.comb(len(shares), 2)
    if num_pairs == 0:
        return False
    z = NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / num_pairs)
    low, high = min(shares), max(shares)
    return high - low > z * math.sqrt(2) * standard_error((low + high) / 2, num_samples)
