"""Emulated devices: gradients are real, and times are computed (ranks).

    seconds of a step  =  f * (1 + u) * (p * a + c * n) + s

n: the worker's samples in this step; c: the seconds of a sample; a: the micro-batches;
p: the fixed seconds of a pass, for any number of samples; f, s: the factor and the seconds of
``--slow``; u: a random number between 0 and ``--jitter``, given by the seed, the rank and the step.
The formula gives the time at which a worker is ready.  ddpnb measures no times during training.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from ddpnb.protocol.devices import Compute, Devices
from ddpnb.protocol.notation import Slow

TRIAL_SECONDS = 2.0
"""Seconds for which ddpnb measures a core."""
LEAST_TRIALS = 3
"""The fewest measured steps.  The first step is slower, because caches are cold."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """The computing times of emulated devices."""

    compute: Compute
    num_passes: int = 1
    """Micro-batches per step."""
    slow: Sequence[Slow] = ()
    jitter: float = 0.0
    seed: int = 0

    def factor(self, rank: int, step: int) -> float:
        """Return the factor by which a rank's computing is slower in a step."""
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
        """Return the seconds of passes over ``num_samples`` in total, without slowdown."""
        return self.compute.of(num_samples) + (num_passes - 1) * self.compute.fixed

    def step(self, rank: int, step: int, num_samples: int) -> float:
        """Return the seconds of a whole step, without communication."""
        computing = self.work(num_samples, self.num_passes)
        return self.factor(rank, step) * computing + self.delay(rank)


@final
@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """The emulated devices of one run."""

    devices: Devices
    times: ComputeTimes
    num_bytes: int
    """Bytes of the gradients of the model that is trained."""
    num_in_shard: Callable[[Any], int] = lambda _: 0
    """Returns the number of samples in a shard."""

    @cached_property
    def scale(self) -> float:
        """Bytes of the emulated model per byte of the trained model."""
        return (self.devices.num_gradient_bytes or self.num_bytes) / max(self.num_bytes, 1)


def measured(make: Callable[[], object], num_samples: int) -> Compute:
    """Return this thread's computing speed, from the processor time of the fastest of many steps.

    Other programs hardly change this time.  ``make`` makes a step on ``num_samples`` samples.
    """
    fastest = math.inf
    trials, end = 0, time.monotonic() + TRIAL_SECONDS
    while trials < LEAST_TRIALS or time.monotonic() < end:
        trials += 1
        began = time.thread_time()
        make()
        fastest = min(fastest, time.thread_time() - began)
    return Compute(fastest / num_samples)
