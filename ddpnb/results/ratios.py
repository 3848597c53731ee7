"""Tests if two strategies differ: computes mean ratios and their intervals.  Runs in the kernel.

In one repeat all strategies have the same seed, so strategies are compared repeat by repeat: x_r is
the ratio of two values in repeat r.  For n repeats and m comparisons in one sentence:

    exp( mean(log x)  +-  t(1 - 0.05 / 2m, n - 1) * sd(log x) / sqrt(n) )

The result is the geometric mean and an interval from Student's t.  The interval is so wide that all
m intervals are right in 95 % of sentences (Bonferroni).  A difference is claimed if the interval
excludes 1 and the ratio differs from 1 by at least ``SMALLEST_EFFECT``.

Let exp(e) be the true ratio and s the standard deviation of log x.  Then noncentral t with n - 1
degrees of freedom and the noncentrality e * sqrt(n) / s exceeds the quantile above with the same
probability with which the interval of n repeats excludes 1.  ``repeats_needed`` is the smallest n
for which this probability is 80 %.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.notation import Target
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import SCORES, Row, run_rows, strategy_rows
from ddpnb.results.run import Status

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
"""Joint confidence level of all intervals in a sentence."""

POWER = 0.8
"""The probability with which ``repeats_needed`` repeats show a difference."""

SMALLEST_EFFECT = 0.02
"""The smallest relative difference that a sentence mentions."""

SMALLEST_ACCURACY_EFFECT = 0.005

FEWEST_REPEATS = 3
"""Minimum number of repeats for an interval.  Two repeats would give +- 12.7 standard errors."""

MOST_REPEATS = 30
"""Maximum number of repeats that ddpnb recommends."""

TIMES = ("samples_per_second", "seconds_to_target", "samples_to_target")


class Verdict(StrEnum):
    """What the repeats show about two strategies."""

    FEW_REPEATS = "too few repeats"
    DIFFERENT = "different"
    SIMILAR = "similar"
    """Any difference is smaller than the smallest effect."""
    UNDECIDED = "undecided"


def ratios_frame(comparison: Comparison, target: Target | None = None) -> "pd.DataFrame":
    """Return one row per quantity and strategy, with the ratio to the reference strategy.

    The reference is ``single``, or the first strategy if there is no ``single``.  ``no-comm``
    counts only if it is the only other strategy.  Speeds and times of emulated strategies never
    count.  The frame is empty for several comparisons, because their models may differ.
    """
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    return pd.DataFrame(ratio_rows(comparison, target), columns=COLUMNS)


COLUMNS = (
    *("comparison", "quantity", "strategy", "reference", "ratio", "low", "high"),
    *("num_repeats", "repeats_needed", "verdict"),
)


def ratio_rows(comparison: Comparison, target: Target | None = None) -> list[Row]:
    """Return the rows of ``ratios_frame``."""
    strategies = strategy_rows(comparison, target)
    if len({row["comparison"] for row in strategies}) > 1:
        return []
    done = [row for row in strategies if row["status"] == Status.FINISHED.value]
    runs = [row for row in run_rows(comparison, target) if row["is_compared"]]
    found = []
    for quantity in (*TIMES, *SCORES):
        values = {
            row["strategy"]: own
            for row in done
            if (own := _by_repeat(runs, row["strategy"], quantity))
            and not (row["is_emulated"] and quantity in TIMES)
        }
        reference = BASELINE if BASELINE in values else next(iter(values), "")
        others = [name for name in values if name != reference]
        others = [name for name in others if name != CEILING] or others
        for name in others:
            names = {"comparison": done[0]["comparison"], "quantity": quantity, "strategy": name}
            logs = log_ratios(values[name], values[reference])
            small = SMALLEST_ACCURACY_EFFECT if "accuracy" in quantity else SMALLEST_EFFECT
            row = ratio_row(logs, len(others), small)
            if row["num_repeats"] == 1 and quantity == TIMES[0]:
                row |= _within_runs(runs, name, reference)
            if logs:
                found.append(names | {"reference": reference} | row)
    return found


def _by_repeat(runs: Sequence[Row], name: str, quantity: str) -> Mapping[int, float]:
    """Return a strategy's values in its finished repeats.

    A held-out score does not count in the repeat whose held-out score chose the learning rate, if
    there are other repeats.
    """
    own = [row for row in runs if row["strategy"] == name and row["status"] == "finished"]
    if quantity in SCORES:
        own = [row for row in own if not row["chose_rate"]] or own
    return {row["repeat"]: row[quantity] for row in own if row.get(quantity, math.nan) > 0}


def log_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the logarithm of the ratio for each repeat in which both numbers are known.

    Infinite times, of repeats that missed a target, have an infinite or unknown logarithm.
    """
    pairs = [(ours[repeat], theirs[repeat]) for repeat in ours if repeat in theirs]
    return [math.inf if our == math.inf else math.log(our / their) for our, their in pairs]


def _within_runs(runs: Sequence[Row], name: str, reference: str) -> Row:
    """Return the range of a single repeat's ratio, from the tenths of the two runs."""
    ours, theirs = (
        next(row for row in runs if row["strategy"] == each and row["status"] == "finished")
        for each in (name, reference)
    )
    return {
        "low": ours["slowest_tenth"] / theirs["fastest_tenth"],
        "high": ours["fastest_tenth"] / theirs["slowest_tenth"],
    }


def ratio_row(logs: Sequence[float], num_claims: int = 1, smallest: float = SMALLEST_EFFECT) -> Row:
    """Return a ratio, its interval and the verdict.

    Args:
        logs: the logarithm of the ratio in each repeat.
        num_claims: number of comparisons in one sentence.
        smallest: the smallest relative difference that is claimed.
    """
    num = len(logs)
    middle = fmean(logs) if logs else math.nan
    low, high = (min(logs), max(logs)) if num > 1 else (math.nan, math.nan)
    verdict, needed = Verdict.FEW_REPEATS, 0
    if num >= FEWEST_REPEATS and math.isfinite(middle):
        deviation = stdev(logs)
        half = _quantile(num, num_claims) * deviation / math.sqrt(num)
        low, high, least = middle - half, middle + half, math.log1p(smallest)
        excludes_one = low > 0 or high < 0
        if excludes_one and abs(middle) >= least:
            verdict = Verdict.DIFFERENT
        elif excludes_one or max(abs(low), abs(high)) < least:
            verdict = Verdict.SIMILAR
        else:
            verdict = Verdict.UNDECIDED
            needed = repeats_needed(abs(middle), deviation, num, num_claims, least)
    elif num >= FEWEST_REPEATS:
        verdict, low, high = Verdict.UNDECIDED, math.nan, math.nan
    return {
        "ratio": math.exp(middle),
        "low": math.exp(low),
        "high": math.exp(high),
        "num_repeats": num,
        "repeats_needed": needed,
        "verdict": verdict.value,
    }


def repeats_needed(
    effect: float, deviation: float, num_repeats: int, num_claims: int, least: float
) -> int:
    """Return the number of repeats that show an effect with the probability ``POWER``.

    The result is 0 if this number is above ``MOST_REPEATS``.

    Args:
        effect: logarithm of the true ratio.
        deviation: standard deviation of the ratio's logarithm over the repeats.
        num_repeats: the number of repeats so far.  The result is larger.
        num_claims: number of comparisons in one sentence.
        least: logarithm of the smallest ratio that is claimed.
    """
    from scipy.special import nctdtr  # noqa: PLC0415  takes 0.1 s

    for num in range(num_repeats + 1, MOST_REPEATS + 1):
        error = deviation / math.sqrt(num)
        not_excluded = float(nctdtr(num - 1, effect / error, _quantile(num, num_claims)))
        too_small = NormalDist(effect, error).cdf(least)
        if not_excluded + too_small <= 1 - POWER:
            return num
    return 0


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
