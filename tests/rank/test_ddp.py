"""Do DDP's options do what torch says, and is what it hides counted so?"""

import pytest

from tests.cells import ROWS
from tests.rank.fit import Problem, by_hand, by_strategy, distance
from tests.rank.runs import spec_of, steps_of, train_job


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_compressed_gradients_are_weighted_as_plain_ones(ranks, hook):
    """Shares of 4, 3 and 3 samples: gradients averaged without weights would be far off."""
    problem = Problem(optimizer="sgd", num_epochs=1)
    start = Problem(optimizer="sgd", num_epochs=0.01, learning_rate=0.0)
    fits = ranks(3).call(by_strategy, f"ddp:hook={hook}", problem)
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    reference = by_hand(problem, 3)
    moved = distance(by_hand(start, 3), reference)
    off = {"fp16": 2e-3, "bf16": 2e-2}[hook]
    assert 0 < distance(fits[0], reference) < off * moved


DEEP = f"""
import torch
import torch.distributed as dist
from torch import nn

def model():
    inner = [nn.Linear(256, 256) for _ in range(8)]
    return nn.Sequential(nn.Linear(4, 256), *inner, nn.Linear(256, 2))
{ROWS}"""
"""Eight layers of 0.26 MB: in several buckets, but for DDP's first step, all but one early."""
HIDES = ["ddp", "ddp:hook=fp16", "ddp-overlap-by-hand:bucket_mb=0.6"]


@pytest.mark.parametrize("word", [*HIDES, "ddp-shm"])
def test_exposed_and_hidden_communication_are_distinguished(ranks, word):
    for result in ranks(2).call(train_job, spec_of(word, source=DEEP)):
        for step in steps_of(result)[1:]:
            parts = step.parts
            assert parts.communication > 0
            assert (parts.waiting > 0) == (word == "ddp-shm")
            assert (parts.hidden > 0) == (word in HIDES)
            assert parts.hidden < parts.backward + parts.communication
