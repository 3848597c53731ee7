"""Does the literature's effect of staleness show, in the direction in which it reports it?"""

import torch
from torch import Tensor

from ddpnb.rank.strategies.async_ps import ParameterStore
from tests.rank.fit import Problem, packed


def test_the_more_stale_the_gradients_the_less_is_learnt_per_sample():
    fresh, stale, staler = (loss_after(48, num_workers) for num_workers in (1, 4, 8))
    assert fresh < 0.5 * stale
    assert stale < 0.5 * staler


def loss_after(num_gradients: int, num_workers: int) -> float:
    """Loss on a convex problem after so many gradients, each as old as there are other workers."""
    inputs, targets = Problem().data()
    copies = packed([torch.zeros(6, 3)], num_workers)
    store = ParameterStore(copies, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    trains_on = [store.read(rank) for rank in range(num_workers)]
    for number in range(num_gradients):
        rank = number % num_workers
        pulled = copies[trains_on[rank]].tensors[0]
        staleness = store.write(rank, [gradient(pulled, inputs, targets)], 1.0)
        assert staleness == min(number, num_workers - 1)
        trains_on[rank] = store.read(rank)
    return loss(store.tensors[0], inputs, targets).item() - floor(inputs, targets)


def gradient(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * inputs.T @ (inputs @ weight - targets) / len(inputs)


def loss(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    return (inputs @ weight - targets).square().sum(dim=1).mean()


def floor(inputs: Tensor, targets: Tensor) -> float:
    return loss(torch.linalg.lstsq(inputs, targets).solution, inputs, targets).item()
