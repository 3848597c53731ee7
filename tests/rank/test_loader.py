"""Processes that prefetch yield the same samples; how they end: ``tests/kernel``."""

import multiprocessing
from contextlib import closing
from dataclasses import replace

import pytest

from ddpnb.rank.training.context import build_context
from tests.cells import DATASET, RAGGED
from tests.rank import runs
from tests.rank.runs import losses, steps_of, train_job


def spec_of(strategy: str, **changes):
    values = {"source": DATASET, "num_epochs": 3, "batch_size": 20, "num_data_workers": 2}
    return runs.spec_of(strategy, **values | changes)


def loading_job(state, folder, spec):
    """Train where a rank may have children."""
    multiprocessing.current_process()._config["daemon"] = False
    return train_job(state, folder, spec)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "source"),
    [("dp", 2, DATASET), ("async", 1, DATASET), ("ddp", 2, RAGGED)],
)
def test_samples_and_their_order_are_the_same(ranks, strategy, num_ranks, source):
    spec = spec_of(strategy, source=source)
    direct = ranks(num_ranks).call(loading_job, replace(spec, num_data_workers=0))
    ahead = ranks(num_ranks).call(loading_job, spec)
    assert [losses(result) for result in ahead] == [losses(result) for result in direct]
    assert losses(ahead[0])


def test_workers_that_take_shards_from_a_queue_take_each_sample_once(ranks):
    results = ranks(2).call(loading_job, spec_of("async"))
    assert sum(step.num_samples for each in results for step in steps_of(each)) == 3 * 100


def augmented_job(state, folder, seed):
    """Return the inputs of this rank's first step, which are drawn at random."""
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
    source = DATASET.replace("return self.inputs[i],", "return torch.randn(4),")
    context = build_context(spec_of("ddp", source=source, seed=seed), state, {}, filename="here")
    with closing(context.strategy()) as strategy:
        strategy.setup(context.worker("t", num_steps=1))
        with context.source(strategy.shards()) as source:
            _, (inputs, _) = next(source)
    return inputs.tolist()


def test_processes_draw_other_random_numbers_on_each_rank_and_for_each_seed(ranks):
    drawn = [str(inputs) for seed in (0, 1) for inputs in ranks(2).call(augmented_job, seed)]
    assert len(set(drawn)) == len(drawn) == 4
    assert [str(inputs) for inputs in ranks(2).call(augmented_job, 1)] == drawn[2:]
