"""How long does an emulated device compute?  (ranks)

    seconds of a step  =  f * (1 + u) * (p * a + c * n) + s

n: the samples of the worker in this step; c: the seconds of a sample; a: the micro-batches;
p: the seconds of a pass, however few samples it has; f, s: the factor and the seconds of
``--slow``; u: a number between 0 and ``--jitter``, drawn from the seed, the rank and the step.
Whoever knows these knows when a worker will be ready: nothing is measured while it trains.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ddpnb.protocol.notation import parse_slow

FORWARD_SHARE = 1 / 3
"""Of a step's computing: a backward pass has two matrix products for each of the forward pass
(Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """The seconds that each emulated device computes."""

    seconds_per_sample: float
    seconds_per_pass: float = 0.0
    """Of a forward and a backward pass, however few samples they have."""
    num_passes: int = 1
    """Micro-batches of a step."""
    seconds_per_replica: float = 0.0
    """What Python takes to call the layers of one of several replicas in a process, as all threads
    of DataParallel take turns at it."""
    wrapper_seconds: float = 0.0
    """What DDP itself adds to a step: its hooks, and the copies to its buckets."""
    slow: Sequence[str] = ()
    """As ``--slow`` names them."""
    jitter: float = 0.0
    seed: int = 0

    def factor(self, rank: int, step: int) -> float:
        """Return by how much a rank's computing takes longer in one of its steps."""
        factor = 1.0
        if self.jitter:
            factor += self.jitter * random.Random(f"{self.seed} {rank} {step}").random()
        for fault in map(parse_slow, self.slow):
            if fault.rank == rank:
                factor *= fault.factor
        return factor

    def delay(self, rank: int) -> float:
        """Return the seconds that ``--slow`` adds to each step of a rank."""
        return sum(fault.seconds for fault in map(parse_slow, self.slow) if fault.rank == rank)

    def work(self, num_samples: int) -> float:
        """Return the seconds of one pass over some samples on a device that is not slow."""
        return self.seconds_per_pass + self.seconds_per_sample * num_samples

    def step(self, rank: int, step: int, num_samples: int) -> float:
        """Return the seconds of a whole step, without any exchange."""
        passes = self.num_passes * self.seconds_per_pass
        computing = passes + self.seconds_per_sample * num_samples
        return self.factor(rank, step) * computing + self.delay(rank)
