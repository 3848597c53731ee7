"""Emulated devices compute real gradients, and a formula gives the time of each step.

    seconds of a step  =  f * (1 + u) * (p * a + c * n) + s

n: number of the worker's samples in this step; c: seconds per sample; a: number of micro-batches;
p: seconds per pass that do not depend on the number of samples; f, s: factor and seconds of
``--slow``; u: random number between 0 and ``--jitter`` (from the seed, the rank and the step).
ddpnb computes the end of each step from this formula.  Training times are not measured.
Runs on the ranks.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from ddpnb.protocol.devices import Compute, Devices
from ddpnb.protocol.notation import Slow

TRIAL_SECONDS = 2.0
"""Seconds for which ddpnb measures the speed of a core."""
LEAST_TRIALS = 3
"""Minimum number of measured steps.  The first step is slower, because caches are cold."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """The computing times of emulated devices."""

    compute: Compute
    num_passes: int = 1
    """Number of micro-batches per step."""
    slow: Sequence[Slow] = ()
    jitter: float = 0.0
    seed: int = 0

    def factor(self, rank: int, step: int) -> float:
        """Return the factor by which ``--slow`` and ``--jitter`` slow down a rank in a step."""
        factor = 1.0
        if self.jitter:
            factor += self.jitter * random.Random(f"{self.seed} {rank} {step}").random()
        for fault in self.slow:
            if fault.rank == rank:
                factor *= fault.factor
        return factor

    def delay(self, rank: int) -> float:
        """Return the seconds that ``--slow`` adds to each step of a rank."""
        return sum(fault.seconds for fault in self.slow if fault.rank == rank)

    def work(self, num_samples: int, num_passes: int = 1) -> float:
        """Return the time, in seconds, of all samples in ``num_passes`` passes without slowdown."""
        return self.compute.of(num_samples) + (num_passes - 1) * self.compute.fixed

    def step(self, rank: int, step: int, num_samples: int) -> float:
        """Return the time of a whole step in seconds, without communication."""
        computing = self.work(num_samples, self.num_passes)
        return self.factor(rank, step) * computing + self.delay(rank)


@final
@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The emulated devices of one run."""

    devices: Devices
    times: ComputeTimes
    num_bytes: int
    """Size of the trained model's gradients in bytes."""
    num_in_shard: Callable[[Any], int] = lambda _: 0
    """Function that returns the number of samples in a shard."""

    @cached_property
    def scale(self) -> float:
        """Gradient bytes of the emulated model, divided by gradient bytes of the trained model."""
        return (self.devices.num_gradient_bytes or self.num_bytes) / max(self.num_bytes, 1)


def measured(take_step: Callable[[int], object], sizes: Iterable[int]) -> Compute:
    """Return this thread's computing speed in the fastest of many steps of each size.

    ddpnb measures processor time, because other programs hardly affect it.  ``take_step(size)``
    must take a step on this number of samples.  All sizes together take ``TRIAL_SECONDS``.
    """
    fastest = dict.fromkeys(sizes, math.inf)
    spent = dict.fromkeys(fastest, 0.0)
    trials, end = 0, time.monotonic() + TRIAL_SECONDS
    while trials < LEAST_TRIALS or time.monotonic() < end:
        trials += 1
        size = min(spent, key=spent.__getitem__)
        began = time.thread_time()
        take_step(size)
        seconds = time.thread_time() - began
        spent[size] += seconds
        fastest[size] = min(fastest[size], seconds)
    return Compute.fitted(fastest)
