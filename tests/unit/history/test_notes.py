"""Is the stable learning rate that of the recurrence itself, and is it said where it is small?"""

import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.history.notes import notes_of, stable_rate
from ddpnb.rank.strategies.asynchronous import ParameterStore
from tests.rank.fit import packed
from tests.unit.history.fake_runs import fake_run

NUM_STEPS = 6000


def grows(rate: float, momentum: float, staleness: int) -> bool:
    """Whether w(t+1) = w(t) + m (w(t) - w(t-1)) - rate w(t-d) leaves its minimum at 0."""
    seen = deque([1.0] * (staleness + 1), maxlen=staleness + 1)
    moved, largest = 0.0, []
    for _ in range(4):
        peak = 0.0
        for _ in range(NUM_STEPS // 4):
            moved = momentum * moved + rate * seen[0]
            seen.append(seen[-1] - moved)
            peak = max(peak, abs(seen[-1]))
            if peak > 1e6:
                return True
        largest.append(peak)
    return largest[-1] > largest[1]


@pytest.mark.parametrize(("momentum", "staleness"), [(0.0, 0), (0.5, 3), (0.9, 1), (0.99, 20)])
def test_the_limit_is_where_the_recurrence_begins_to_grow(momentum, staleness):
    limit = stable_rate(momentum, staleness)
    assert not grows(0.97 * limit, momentum, staleness)
    assert grows(1.03 * limit, momentum, staleness)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_server_itself_leaves_the_minimum_beyond_the_limit(num_workers):
    """Workers in turns; the loss is w^2 / 2, the learning rate a part of the limit."""

    def end(part: float) -> float:
        limit = num_workers * stable_rate(0.9, num_workers - 1)
        parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
        store = ParameterStore(
            packed([parameter], num_workers),
            lambda parameters: torch.optim.SGD(parameters, lr=part * limit, momentum=0.9),
        )
        for rank in range(num_workers):
            store.read(rank)
        for step in range(1000):
            rank = step % num_workers
            store.write(rank, [store.copies[rank].tensors[0]], 1 / num_workers)
            store.read(rank)
        return abs(store.tensors[0].item())

    assert end(0.8) < 1e-2
    assert end(1.2) > 1e2


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
