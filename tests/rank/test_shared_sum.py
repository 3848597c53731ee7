"""The all-reduce in shared memory is right, even if a rank reads late."""

import random
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.rank.collectives.shared_memory import SharedSums

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def whole_numbers(rank: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, so that their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(number * 16 + rank)
    return torch.randint(-16, 16, (size,), generator=generator).to(dtype)


def stress(state, folder: Path) -> int:
    """Add tensors of random sizes, and read some late. Return the number of wrong sums."""
    sizes, pauses, num_wrong = random.Random(7), random.Random(state.rank), 0

    def late(wait):
        def wait_and_pause(*args):
            wait(*args)
            if pauses.random() < 0.02:
                time.sleep(0.003)

        return wait_and_pause

    with (
        mock.patch.object(torch_internals, "wait_for_all", late(torch_internals.wait_for_all)),
        mock.patch.object(SharedSums, "_wait_for_sums", late(SharedSums._wait_for_sums)),
        closing(SharedSums(folder / "stress", lambda: None)) as shared,
    ):
        for number in range(200):
            most = 800_000 if number % 20 == 0 else 5000
            size, dtype = sizes.choice([1, 2, 3, sizes.randint(1, most)]), sizes.choice(DTYPES)
            flat = whole_numbers(state.rank, number, size, dtype)
            shared.add(dist.group.WORLD, flat)
            ranks = range(state.world_size)
            expected = sum(whole_numbers(rank, number, size, dtype) for rank in ranks)
            num_wrong += not torch.equal(flat, expected)
        dist.barrier()
    return num_wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_of_any_size_and_type_are_right(ranks, num_ranks):
    assert ranks(num_ranks).call(stress) == [0] * num_ranks
    assert list(ranks(num_ranks).folder.iterdir()) == []
