"""Do the literature's effects of asynchrony show, in the direction in which it reports them?"""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ddpnb.rank.servers.store import ParameterStore
from ddpnb.rank.strategies import make_strategy
from tests.rank.fit import Problem, drive, packed

RATE = 0.1


def seconds_of(state, folder, name: str, problem: Problem) -> float:
    strategy = make_strategy(name, {})
    began = time.monotonic()
    try:
        drive(strategy, state, folder, problem, be_a_straggler)
    finally:
        strategy.close()
    return time.monotonic() - began


def be_a_straggler(rank: int, step: int) -> None:
    time.sleep(0.05 if rank == 1 else 0.005)


@pytest.mark.parametrize("name", ["async", "async:damping=on", "hogwild"])
def test_with_a_straggler_the_same_samples_take_less_time_than_with_ddp(ranks, name):
    problem = Problem(num_epochs=8, learning_rate=0.02)
    ranks(2).call(seconds_of, name, Problem(num_epochs=1))  # nothing measured is cold
    asynchronous = max(ranks(2).call(seconds_of, name, problem))
    synchronous = max(ranks(2).call(seconds_of, "ddp", problem))
    assert asynchronous < 0.7 * synchronous


def test_a_bound_of_0_waits_for_the_straggler_like_ddp(ranks):
    problem = Problem(num_epochs=8, learning_rate=0.02)
    bounded = max(ranks(2).call(seconds_of, "async:bound=0", problem))
    unbounded = max(ranks(2).call(seconds_of, "async", problem))
    assert bounded > 1.5 * unbounded


def test_the_more_stale_the_gradients_the_less_is_learnt_per_sample():
    fresh, stale, staler = (loss_after(48, num_workers) for num_workers in (1, 4, 8))
    assert fresh < 0.5 * stale
    assert stale < 0.5 * staler


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_damping_helps_where_one_worker_is_slow(momentum):
    """Of 4 workers the last is 20 times as slow: its gradients are of long ago, and large."""
    order = [*[0, 1, 2] * 20, 3] * 2
    chosen = {"order": order, "rate": RATE * (1 - momentum), "momentum": momentum}
    damped, undamped = (
        loss_after(len(order), 4, weight=1 / 4, is_damped=is_so, **chosen)
        for is_so in (True, False)
    )
    assert damped < 0.5 * undamped


def test_damping_changes_nothing_where_no_gradient_is_stale():
    assert loss_after(48, 1, is_damped=True) == pytest.approx(loss_after(48, 1), rel=0.01)


def loss_after(
    num_gradients: int,
    num_workers: int,
    *,
    weight: float = 1.0,
    is_damped: bool = False,
    order: Sequence[int] = (),
    rate: float = RATE,
    momentum: float = 0.0,
) -> float:
    """Loss on a convex problem after so many gradients, each as old as there are other workers.

    The workers take turns, by default one after the other, so that every run is the same.
    """
    in_turns = [number % num_workers for number in range(num_gradients)]
    inputs, targets = Problem().data()
    initial = torch.zeros(6, 3)
    copies = packed([initial], num_workers)
    store = ParameterStore(
        copies,
        lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum),
        is_damped=is_damped,
    )
    trains_on = [store.read(rank) for rank in range(num_workers)]
    for number, rank in enumerate(order or in_turns):
        pulled = copies[trains_on[rank]].tensors[0]
        staleness = store.write(rank, [gradient(pulled, inputs, targets)], weight)
        assert order or staleness == min(number, num_workers - 1)
        trains_on[rank] = store.read(rank)
    return loss(store.tensors[0], inputs, targets).item() - floor(inputs, targets)


def gradient(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * inputs.T @ (inputs @ weight - targets) / len(inputs)


def loss(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return (inputs @ weight - targets).square().sum(dim=1).mean()


def floor(inputs: Tensor, targets: Tensor) -> float:
    return loss(torch.linalg.lstsq(inputs, targets).solution, inputs, targets).item()
