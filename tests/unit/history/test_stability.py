"""Is the stable learning rate that of the recurrence itself, and is it said where it is small?"""

import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.history.model import Run, Status
from ddpnb.history.stability import stability_notes, stable_fraction, stable_rate
from ddpnb.protocol.messages import EventBatch, RunHeader, RunSpec, StepEvent, pack_step
from ddpnb.rank.strategies.asynchronous import ParameterStore
from tests.rank.fit import packed

NUM_STEPS = 6000


def grows(rate: float, momentum: float, staleness: int, momentum_lag: int = 1) -> bool:
    """Whether w(t+1) = w(t) - v(t), v(t) = m v(t-l) + rate w(t-d) leaves its minimum at 0."""
    seen = deque([1.0] * (staleness + 1), maxlen=staleness + 1)
    moved = deque([0.0] * momentum_lag, maxlen=momentum_lag)
    largest = []
    for _ in range(4):
        peak = 0.0
        for _ in range(NUM_STEPS // 4):
            step = momentum * moved[0] + rate * seen[0]
            moved.append(step)
            seen.append(seen[-1] - step)
            peak = max(peak, abs(seen[-1]))
            if peak > 1e6:
                return True
        largest.append(peak)
    return largest[-1] > largest[1]


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 7, 20])
def test_the_limit_is_where_the_recurrence_begins_to_grow(momentum, staleness):
    limit = stable_rate(momentum, staleness)
    assert not grows(0.97 * limit, momentum, staleness)
    assert grows(1.03 * limit, momentum, staleness)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("staleness", "num_workers"), [(1, 2), (3, 4), (7, 8), (2, 4), (0, 2)])
def test_so_it_is_where_each_worker_has_a_momentum_of_its_own(momentum, staleness, num_workers):
    limit = stable_rate(momentum, staleness, num_workers)
    assert not grows(0.97 * limit, momentum, staleness, num_workers)
    assert grows(1.03 * limit, momentum, staleness, num_workers)


@pytest.mark.parametrize("staleness", range(6))
def test_without_momentum_it_is_the_known_limit_of_a_delay(staleness):
    known = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    assert stable_rate(0, staleness) == pytest.approx(known)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_without_staleness_it_is_that_of_synchronous_sgd(momentum):
    assert stable_rate(momentum, 0) == pytest.approx(2 * (1 + momentum))
    assert stable_fraction(momentum, 0, num_updates=1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("momentum", "num_workers", "limit"),
    [(0.9, 2, 0.2), (0.9, 4, 0.14), (0.9, 8, 0.13), (0.5, 2, 1.0), (0.5, 4, 0.8), (0.5, 8, 0.77)],
)
def test_it_is_what_was_simulated_before_there_was_a_formula(momentum, num_workers, limit):
    fraction = stable_fraction(momentum, num_workers - 1, num_workers)
    assert fraction == pytest.approx(limit / (2 * (1 + momentum)), abs=0.005 / (2 * (1 + momentum)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_server_itself_leaves_the_minimum_beyond_the_limit(momentum, num_workers):
    """Workers in turns; the loss is w^2 / 2, the learning rate a part of the limit."""

    def end(part: float) -> float:
        limit = num_workers * stable_rate(momentum, num_workers - 1)
        parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
        store = ParameterStore(
            packed([parameter], num_workers),
            lambda parameters: torch.optim.SGD(parameters, lr=part * limit, momentum=momentum),
        )
        held = [store.copies[store.read(rank)].tensors[0].clone() for rank in range(num_workers)]
        for step in range(1000):
            rank = step % num_workers
            store.write(rank, [held[rank]], 1 / num_workers)
            held[rank] = store.copies[store.read(rank)].tensors[0].clone()
        return abs(store.tensors[0].item())

    assert end(0.8) < 1e-2
    assert end(1.2) > 1e2


def note_of(strategy: str, momentum: float, staleness: int, num_workers: int = 2, **changes):
    run = Run(run_id="r", name=strategy, spec=RunSpec(run_id="r", strategy=strategy, task="digits"))
    header = RunHeader(
        run_id="r",
        strategy=strategy,
        synchronous=False,
        num_workers=num_workers,
        num_threads=1,
        device="cpu",
        backend="gloo",
        num_parameters=1,
        num_samples=64,
        momentum=momentum,
    )
    step = StepEvent(step=0, seconds=1.0, num_samples=32, loss=1.0, staleness=staleness)
    run.add(EventBatch(run_id="r", rank=0, sequence=0, header=header, rows=pack_step(0, step)))
    run.end(Status.FINISHED)
    return stability_notes([replace(run.snapshot(), **changes)], staleness)


def test_a_small_limit_is_said_beside_the_run_in_numbers():
    assert note_of("async", 0.9, 1) == (
        "with momentum 0.9 and a staleness of 1, 5 % of the synchronous learning rate is stable; "
        "with momentum 0, all of it",
    )
    assert note_of("async", 0.9, 7, num_workers=8) == (
        "with momentum 0.9 and a staleness of 7, 3 % of the synchronous learning rate is stable; "
        "with momentum 0, 84 %",
    )
    assert note_of("hogwild", 0.9, 1) == (
        "with momentum 0.9 and a staleness of 1, 10 % of the synchronous learning rate is stable; "
        "with momentum 0, all of it",
    )


def test_nothing_is_said_where_momentum_costs_little_or_the_equation_is_another():
    for strategy, momentum, staleness in (
        ("async", 0.0, 1),
        ("async", 0.2, 1),
        ("async", 0.9, 0),
        ("async:compensate=on", 0.9, 1),
        ("Own", 0.9, 1),
    ):
        assert note_of(strategy, momentum, staleness) == ()
    assert note_of("async", 0.9, 1, status=Status.RUNNING) == ()
