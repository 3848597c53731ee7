"""Every training option has the effect that its help describes."""

from dataclasses import replace

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.training.model_checks import check_strategy
from ddpnb.rank.training.run import Surroundings, load_run
from tests.cells import CELL, HALVING, OWN_SGD
from tests.rank.ranks import make_state
from tests.rank.runs import FEATURED, header_of, losses, spec_of, steps_of, train_job


def optimizer_of(strategy: str, lines: str, num_ranks: int, num_steps: int, **changes):
    """Make a cell's optimizer as for a training of ``num_steps`` global batches."""
    spec = spec_of(strategy, source=CELL + lines, **changes)
    context = load_run(spec, Surroundings(state=make_state(0, num_ranks)))
    worker = context.worker("t", num_steps=num_steps)
    return worker.optimizer(worker.parameters)


@pytest.mark.parametrize(
    ("word", "num_ranks", "num_updates"),
    [("async", 2, 8), ("async:bound=0", 4, 4), ("hogwild", 4, 4), ("gossip", 4, 4)],
)
def test_num_steps_counts_the_updates_of_an_optimizer(word, num_ranks, num_updates):
    """An epoch of 4 steps has 4 gradients per worker. Each gradient could be a separate update."""
    lines = "\ndef optimizer(params, num_steps): return torch.optim.SGD(params, lr=num_steps)\n"
    made = optimizer_of(word, lines, num_ranks, 4, batch_size=50, num_epochs=1)
    assert made.param_groups[0]["lr"] == num_updates


OWN = """
class Own(torch.optim.SGD):
    def step(self, closure=None): return super().step(closure)
"""
"""torch calls the step hooks of this class and of its parent, once the parent has been used."""


@pytest.mark.parametrize("lines", [HALVING, OWN + HALVING.replace("torch.optim.SGD", "Own")])
def test_a_scheduler_of_ones_own_steps_once_with_each_update(lines):
    torch.optim.SGD([torch.ones(1)])
    made = optimizer_of("single", lines, 1, 6, batch_size=100, num_epochs=3)
    for rate in (0.8, 0.4, 0.2, 0.1, 0.05, 0.025):
        made.step()
        assert made.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize("strategy", ["single", *FEATURED])
def test_a_batch_of_each_worker_grows_with_them(ranks, strategy):
    spec = spec_of(strategy, batch_per_worker=20, num_epochs=1)
    results = ranks(2).call(train_job, spec)
    header, steps = header_of(results[0]), [step for each in results for step in steps_of(each)]
    assert {step.num_samples for step in steps} == {40 if strategy == "dp" else 20}
    assert sum(step.num_samples for step in steps) == header.num_samples == 200


@pytest.mark.parametrize(
    ("strategy", "momentum", "used"),
    [("ddp", 0.0, 0.0), ("ddp", 0.9, 0.9), ("async", 0.9, 0.9), ("async:momentum=0", 0.9, 0.0)],
)
def test_momentum_is_what_was_chosen(ranks, strategy, momentum, used):
    spec = spec_of(strategy, momentum=momentum)
    result = ranks(1).call(train_job, spec)[0]
    assert header_of(result).momentum == used
    own = spec_of("single", source=CELL + OWN_SGD.format(momentum=used))
    assert losses(result) == pytest.approx(losses(ranks(1).call(train_job, own)[0]), abs=1e-6)
    if momentum > 0:  # --momentum and a cell's optimizer exclude each other
        with pytest.raises(UserError, match="Momentum"):
            load_run(replace(spec, source=own.source), Surroundings(state=make_state(0, 2)))


@pytest.mark.parametrize("word", ["hogwild", "single:threads=all"])
def test_what_a_strategy_cannot_do_is_refused(word):
    context = load_run(spec_of("ddp"), Surroundings(state=make_state(0, 2)))
    worker = replace(context.worker("t", num_steps=1), device=torch.device("cuda"))
    with pytest.raises(UserError, match=word.partition(":")[0]):
        check_strategy(word, worker)
