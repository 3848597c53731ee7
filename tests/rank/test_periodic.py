"""Ranks that rarely communicate average the right values, at the right steps and partners."""

import pytest
import torch

from ddpnb.rank.strategies.gossip import partner_in_step
from ddpnb.rank.tasks.batches import Shard
from tests.rank.fit import Fit, Problem, by_strategy, distance, fit_of


@torch.no_grad()
def average(models: list[torch.nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(same) / len(same)
        for parameter in same:
            parameter.copy_(mean)


def trained_apart(problem: Problem, num_ranks: int, meet) -> Fit:
    """Train all ranks' models in one process, and call ``meet(step, models)`` after each step."""
    models = [problem.build() for _ in range(num_ranks)]
    optimizers = [problem.factory()(list(model.parameters())) for model in models]
    order, (inputs, targets) = problem.order(num_ranks), problem.data()
    for step in range(order.num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            indices = order.indices(Shard(step=step, index=rank, num_shards=num_ranks))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
        meet(step, models)
    average(models)
    return fit_of(models[0], [])


@pytest.mark.parametrize(
    "word", ["local-sgd:every=4", "diloco:every=4,outer_lr=1,outer_momentum=0"]
)
def test_local_sgd_is_training_apart_and_averaging(ranks, word):
    problem = Problem(num_epochs=5, optimizer="adam")
    fits = ranks(3).call(by_strategy, word, problem)
    expected = trained_apart(problem, 3, lambda step, models: step % 4 == 3 and average(models))
    assert all(distance(fit, expected) < 1e-5 for fit in fits)


# 35 and 37 steps. The last round of 37 steps is incomplete, so its weights are averaged plainly.
@pytest.mark.parametrize("num_epochs", [5, 37 / 7])
def test_diloco_makes_nesterov_steps_on_the_averaged_change(ranks, num_epochs):
    # An outer momentum of 0.9 (a gain of 7) would enlarge rounding differences to 1e-5.
    rate, momentum, problem = 0.7, 0.5, Problem(num_epochs=num_epochs)
    agreed = [p.detach().clone() for p in problem.build().parameters()]
    velocity = [torch.zeros_like(p) for p in agreed]

    @torch.no_grad()
    def outer_step(step, models) -> None:
        if (step + 1) % 5:
            return
        average(models)
        for number, mean in enumerate(list(models[0].parameters())):
            change = agreed[number] - mean
            velocity[number] = momentum * velocity[number] + change
            agreed[number] = agreed[number] - rate * (change + momentum * velocity[number])
        for model in models:
            for parameter, value in zip(model.parameters(), agreed, strict=True):
                parameter.copy_(value)

    assert problem.order(2).num_steps in (35, 37)
    word = f"diloco:every=5,outer_lr={rate},outer_momentum={momentum}"
    fits = ranks(2).call(by_strategy, word, problem)
    expected = trained_apart(problem, 2, outer_step)
    assert all(distance(fit, expected) < 1e-5 for fit in fits)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gossip_is_averaging_in_pairs(ranks, num_ranks):
    def meet(step, models) -> None:
        for rank, model in enumerate(models):
            other = partner_in_step(step, rank=rank, world_size=num_ranks)
            if other is not None and other > rank:
                average([model, models[other]])

    fits = ranks(num_ranks).call(by_strategy, "gossip", Problem())
    expected = trained_apart(Problem(), num_ranks, meet)
    assert all(distance(fit, expected) < 1e-5 for fit in fits)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_partners_meet_each_other_and_change(num_ranks):
    seen = set()
    for step in range(2 * num_ranks):
        met = [partner_in_step(step, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
        assert met.count(None) == num_ranks % 2  # one of an odd number has no partner
        for rank, other in enumerate(met):
            if other is not None:
                assert met[other] == rank
                assert (rank - other) % num_ranks in (1, num_ranks - 1)  # ring neighbours
                seen.add(frozenset((rank, other)))
    assert len(seen) == (num_ranks if num_ranks > 2 else num_ranks - 1)  # both neighbours
