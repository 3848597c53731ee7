"""The stable learning rate that docs/staleness.md derives agrees with the real server."""

import math

import pytest
import torch
from torch import nn

from ddpnb.rank.strategies.async_ps import ParameterStore
from tests.rank.fit import packed

CASES = [(0.0, 1), (0.5, 4), (0.9, 2), (0.9, 4), (0.99, 21)]


def stable_rate(momentum: float, staleness: int) -> float:
    """Return the largest stable rate. Bisection finds the angle of a root with magnitude 1."""
    low, high = 0.0, math.pi
    for _ in range(60):
        t = (low + high) / 2
        turned = math.atan2(momentum * math.sin(t), 1 - momentum * math.cos(t))
        low, high = (t, high) if (staleness + 0.5) * t + turned < math.pi / 2 else (low, t)
    return 2 * math.sin(low / 2) * math.sqrt(1 - 2 * momentum * math.cos(low) + momentum**2)


@pytest.mark.parametrize(("momentum", "num_workers"), CASES)
def test_beyond_the_limit_the_server_leaves_the_minimum(momentum: float, num_workers: int):
    """Workers take turns on the loss w^2 / 2, with a learning rate near the limit."""

    def farthest(part: float) -> float:
        """Start at a distance of 1 from the minimum. Return the largest in steps 1500 to 2000."""
        limit = num_workers * stable_rate(momentum, num_workers - 1)
        parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
        store = ParameterStore(
            packed([parameter], num_workers),
            lambda parameters: torch.optim.SGD(parameters, lr=part * limit, momentum=momentum),
        )
        for rank in range(num_workers):
            store.pull(rank)
        reached = []
        for step in range(2000):
            rank = step % num_workers
            store.push(rank, [store.copies[rank].tensors[0]], 1 / num_workers)
            store.pull(rank)
            reached.append(abs(store.tensors[0].item()))
        return max(reached[1500:])

    assert farthest(0.97) < 0.9
    assert farthest(1.03) > 1.1
