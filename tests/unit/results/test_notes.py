"""The stable learning rate agrees with the real server, and a note warns if it is small."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.rank.strategies.async_ps import ParameterStore
from ddpnb.results.notes import notes_of, stable_rate
from tests.rank.fit import packed
from tests.unit.results.fake_runs import fake_run

CASES = [(0.0, 1), (0.5, 4), (0.9, 2), (0.9, 4), (0.99, 21)]


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


def notes(strategy: str, momentum: float, staleness: float) -> tuple[str, ...]:
    run = fake_run("async", num_steps=4).snapshot()
    spec, header = replace(run.spec, strategy=strategy), replace(run.header, momentum=momentum)
    runs = [replace(run, spec=spec, header=header)]
    return notes_of(runs, runs, staleness)


def test_a_small_limit_is_said_and_nothing_where_the_equation_is_another():
    (note,) = notes("async", 0.9, 1.0)
    assert "5 % of the synchronous learning rate" in note
    for strategy, momentum, staleness in (
        ("async", 0.2, 1.0),
        ("async", 0.9, math.nan),
        ("async:compensate=on", 0.9, 1.0),
        ("Own", 0.9, 1.0),
    ):
        assert notes(strategy, momentum, staleness) == ()
