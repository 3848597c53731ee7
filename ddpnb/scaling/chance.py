"""Stragglers, and what a larger batch costs: expected values.  (Kernel.)"""

import math

import numpy as np

DISTRIBUTIONS = ("normal", "exponential")


def expected_max(num: int, distribution: str = "normal") -> float:
    """Return the expected maximum of ``num`` independent values, in standard deviations.

    Above their mean, of values with mean 0 and standard deviation 1:

        normal       the integral of x d(F(x)^N), F the normal distribution; about sqrt(2 ln N)
        exponential  1 + 1/2 + ... + 1/N - 1, of values that are never below -1

    Source: David and Nagaraja, "Order Statistics", 2003, chapters 3 and 4.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"no distribution {distribution!r}")
    if num == 1:
        return 0.0
    if distribution == "exponential":
        return float(np.sum(1.0 / np.arange(1, num + 1))) - 1.0
    x = np.linspace(0.0, 10.0, 4001)
    tail = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in x])
    # E[max] = integral over x > 0 of 1 - F(x)^N - F(-x)^N
    return float(np.trapezoid(1 - (1 - tail) ** num - tail**num, x))


def samples_at(batch_size: float, fewest_samples: float, critical_batch: float) -> float:
    """Return the samples to a given loss with a batch size.

        E(B) = E_min (1 + B / B_crit)

    with E_min the samples that the smallest batches need.  Source: McCandlish, Kaplan and Amodei,
    "An Empirical Model of Large-Batch Training", arXiv:1812.06162, 2018, equations 2.11 and 2.12:
    (S / S_min - 1) (E / E_min - 1) = 1, E = B S and B_crit = E_min / S_min.
    """
    return fewest_samples * (1 + batch_size / critical_batch)


def seconds_to_target(
    samples_per_second: float, batch_size: float, fewest_samples: float, critical_batch: float
) -> float:
    """Return how long a training takes to a given loss: ``samples_at`` over the rate."""
    return samples_at(batch_size, fewest_samples, critical_batch) / samples_per_second
