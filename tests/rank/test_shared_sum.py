"""Is the all-reduce in shared memory right, and are its waits freed where a rank dies?"""

import random
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddpnb.rank.meter import Meter, Timer
from ddpnb.rank.servers.shared_sum import CHUNK_BYTES, SharedAllReduce
from ddpnb.rank.strategies import make_strategy
from tests.rank.fit import Problem

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def opened(state, folder: Path, timeout_seconds: float = 30.0, **fields) -> SharedAllReduce:
    context = Problem().context(make_strategy("ddp-shm", {}), state, folder)
    return SharedAllReduce(replace(context.worker("t", num_steps=1), **fields), timeout_seconds)


def whole_numbers(rank: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers so small that their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(number * 16 + rank)
    return torch.randint(-16, 16, (size,), generator=generator).to(dtype)


class LateReader(Timer):
    """Now and then sleeps when a wait ends: this rank reads late what others have written."""

    def __init__(self, rank: int) -> None:
        self.pauses, self.phase = random.Random(rank), "backward"

    def begin(self, phase, at=None):
        before, self.phase = self.phase, phase
        if before == "waiting" and self.pauses.random() < 0.02:
            time.sleep(0.003)
        return before


def stress(state, folder):
    """Add tensors of random sizes, some of them read late; return how many sums were wrong."""
    sizes, num_wrong = random.Random(7), 0
    with closing(opened(state, folder, meter=Meter(LateReader(state.rank)))) as shared:
        torch.distributed.barrier()
        assert list(folder.iterdir()) == []
        for number in range(500):
            most = 3 * CHUNK_BYTES // 4 if number % 20 == 0 else 5000
            size, dtype = sizes.choice([1, 2, 3, sizes.randint(1, most)]), sizes.choice(DTYPES)
            flat = whole_numbers(state.rank, number, size, dtype)
            shared.all_reduce(flat)
            ranks = range(state.world_size)
            expected = sum(whole_numbers(rank, number, size, dtype) for rank in ranks)
            num_wrong += not torch.equal(flat, expected)
    return num_wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_of_any_size_and_type_are_right(ranks, num_ranks):
    assert ranks(num_ranks).call(stress) == [0] * num_ranks
