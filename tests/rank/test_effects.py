"""Do the literature's effects of asynchrony show, in the direction in which it reports them?"""

import time

import pytest
import torch
from torch import Tensor

from ddpnb.rank.comm.flat_buffers import pack
from ddpnb.rank.comm.parameter_store import ParameterStore
from ddpnb.rank.strategies import make_strategy
from tests.rank.fit import Problem, drive

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


@pytest.mark.parametrize("name", ["async", "async:damping=on", "hogwild", "gossip", "easgd"])
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


def test_damping_helps_where_gradients_are_stale_and_changes_nothing_where_they_are_not():
    assert loss_after(48, 12, is_damped=True) < 0.5 * loss_after(48, 12)
    assert loss_after(48, 1, is_damped=True) == pytest.approx(loss_after(48, 1), rel=0.01)


def loss_after(num_gradients: int, num_workers: int, *, is_damped: bool = False) -> float:
    """Loss on a convex problem after so many gradients, each as old as there are other workers.

    The workers take turns, so that every run is the same: staleness is ``num_workers - 1``.
    """
    inputs, targets = Problem().data()
    weight = torch.zeros(6, 3)
    copies = [pack([weight]) for _ in range(num_workers)]
    store = ParameterStore(
        [weight], lambda p: torch.optim.SGD(p, lr=RATE), copies=copies, is_damped=is_damped
    )
    trains_on = [store.read(rank) for rank in range(num_workers)]
    for number in range(num_gradients):
        rank = number % num_workers
        pulled = copies[trains_on[rank]].tensors[0]
        staleness = store.write(rank, [gradient(pulled, inputs, targets)])
        assert staleness == min(number, num_workers - 1)
        trains_on[rank] = store.read(rank)
    return loss(store.tensors[0], inputs, targets).item() - floor(inputs, targets)


def gradient(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * inputs.T @ (inputs @ weight - targets) / len(inputs)


def loss(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return (inputs @ weight - targets).square().sum(dim=1).mean()


def floor(inputs: Tensor, targets: Tensor) -> float:
    return loss(torch.linalg.lstsq(inputs, targets).solution, inputs, targets).item()
