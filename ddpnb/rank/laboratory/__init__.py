"""Emulated devices: every gradient is real, every second is computed (ranks).

    seconds of a step  =  f * (1 + u) * (p * a + c * n) + s

n: the samples of the worker in this step; c: the seconds of a sample; a: the micro-batches;
p: the seconds of a pass, however few samples it has; f, s: the factor and the seconds of
``--slow``; u: a number between 0 and ``--jitter``, drawn from the seed, the rank and the step.
Whoever knows these knows when a worker will be ready: nothing is measured while it trains.
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
"""How long a core is measured."""
LEAST_TRIALS = 3
"""The first is cold."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """The seconds that each emulated device computes."""

    compute: Compute
    num_passes: int = 1
    """Micro-batches of a step."""
    slow: Sequence[Slow] = ()
    jitter: float = 0.0
    seed: int = 0

    def factor(self, rank: int, step: int) -> float:
        """Return by how much a rank's computing takes longer in one of its steps."""
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
        """Return the seconds of passes over some samples together, on a device that is not slow."""
        return self.compute.of(num_samples) + (num_passes - 1) * self.compute.fixed

    def step(self, rank: int, step: int, num_samples: int) -> float:
        """Return the seconds of a whole step, without any exchange."""
        computing = self.work(num_samples, self.num_passes)
        return self.factor(rank, step) * computing + self.delay(rank)


@final
@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """The emulated devices of one run, which train one model."""

    devices: Devices
    times: ComputeTimes
    num_bytes: int
    """Of the gradients of the model that is trained."""
    num_in_shard: Callable[[Any], int] = lambda _: 0
    """Returns the samples of a shard."""

    @cached_property
    def scale(self) -> float:
        """Bytes of the emulated model for each byte of the one that is trained."""
        return (self.devices.num_gradient_bytes or self.num_bytes) / max(self.num_bytes, 1)


def measured(make: Callable[[], object], num_samples: int) -> Compute:
    """Return how fast this thread computes: the fastest of many steps, in processor time.

    So other programs hardly change it.  ``make`` makes a step on so many samples.
    """
    fastest = math.inf
    trials, end = 0, time.monotonic() + TRIAL_SECONDS
    while trials < LEAST_TRIALS or time.monotonic() < end:
        trials += 1
        began = time.thread_time()
        make()
        fastest = min(fastest, time.thread_time() - began)
    return Compute(fastest / num_samples)
