"""Do DDP's options do what torch says, and does its communication show where it was?"""

import itertools
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

from ddpnb.rank.collectives.account import Account
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.meter import Meter
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.worker import Batch, Worker
from ddpnb.rank.tasks.base import Supervised
from ddpnb.rank.training.timing import CpuClock, StepReport
from tests.rank.fit import Problem, batch_of, by_hand, by_strategy, distance


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_are_weighted_as_plain_ones(ranks, hook):
    """Shares of 4, 3 and 3 samples: gradients averaged without weights would be far off."""
    problem = Problem(optimizer="sgd", num_epochs=1)
    start = Problem(optimizer="sgd", num_epochs=0.01, learning_rate=0.0)
    more = ",powersgd_rank=3" if hook == "powersgd" else ""
    fits = ranks(3).call(by_strategy, f"ddp:hook={hook}{more}", problem)
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    reference = by_hand(problem, 3)
    moved = distance(by_hand(start, 3), reference)
    off = {"fp16": 2e-3, "bf16": 2e-2, "powersgd": 0.3}[hook]
    assert 0 < distance(fits[0], reference) < off * moved


def test_powersgd_sends_two_thin_matrices_for_each_wide_one(ranks):
    """After its first two steps."""
    first, second, *others = ranks(2).call(by_strategy, "ddp:hook=powersgd", Problem())[0].reports
    plain = 4 * (6 * 16 + 16 + 16 * 3 + 3)
    order = 4 * 6  # DDP also broadcasts the order of its buckets in the second step
    assert (first.traffic.sent, second.traffic.sent) == (plain, plain + order)
    # rank 1: (6 + 16) for 6 x 16, (16 + 3) for 16 x 3; the biases as they are
    assert {each.traffic.sent for each in others} == {4 * (6 + 16 + 16 + 16 + 3 + 3)}


def worker_of(model, state, folder) -> Worker:
    return Worker(
        model=model,
        make_model=lambda: model,
        training_step=Supervised(nn.functional.mse_loss),
        make_optimizer=partial(torch.optim.SGD, lr=0.01),
        device=torch.device("cpu"),
        rank=state.rank,
        world_size=state.world_size,
        num_steps=20,
        folder=folder,
        name="large",
    )


def large_job(state, folder, word):
    """Train a model with gradients that fill more than torch's first bucket; return its buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 2))
    strategy = make_strategy(word, {})
    strategy.setup(worker_of(model, state, folder))
    batch = Batch(content=(torch.randn(4, 600), torch.randn(4, 2)), num_samples=4, num_global=8)
    for _ in range(20):
        strategy.step(batch)
    buckets = strategy.ddp._get_ddp_logging_data()["num_buckets_reduced"]
    return buckets, [p.detach().clone() for p in strategy.finish().parameters()]


def test_powersgd_sends_one_bucket_whose_messages_cannot_mix(ranks):
    plain, powersgd = (ranks(2).call(large_job, word) for word in ("ddp", "ddp:hook=powersgd"))
    assert [buckets for buckets, _ in plain] == [2, 2]
    assert [buckets for buckets, _ in powersgd] == [1, 1]
    (_, first), (_, second) = powersgd
    assert all(map(torch.equal, first, second))


def timed_job(state, folder, word, num_steps):
    """Train a model of several buckets; return the parts of each step."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise([256] * 9)]
    problem, clock = Problem(batch_size=16), CpuClock()
    inputs, targets = torch.randn(64, 256), torch.randn(64, 256)
    timings = []
    worker = worker_of(nn.Sequential(*layers), state, folder)
    worker.meter, worker.num_steps = Meter(clock), num_steps
    with closing(make_strategy(word, {})) as strategy:
        strategy.setup(worker)
        clock.start()
        with listening(Account(worker.meter)):
            for shard in strategy.shards():
                batch = batch_of(problem.order(state.world_size), shard, inputs, targets)
                loss = strategy.step(batch)
                timings += clock.timing(StepReport(loss, batch.num_samples, worker.meter.take()))
        strategy.finish()
    return [(timing.seconds, timing.parts) for timing in timings]


HIDES = ["ddp", "ddp:hook=fp16", "ddp-overlap-by-hand:bucket_mb=0.6"]


@pytest.mark.parametrize("word", [*HIDES, "ddp-shm"])
def test_exposed_and_hidden_communication_are_distinguished(ranks, word):
    for timings in ranks(2).call(timed_job, word, 12):
        ends = [0.0, *(seconds for seconds, _ in timings)]
        for begun, (ended, parts) in zip(ends, timings, strict=False):
            assert sum(parts) - parts.hidden == pytest.approx(ended - begun, abs=1e-6)
            assert min(parts) >= 0
            assert parts.communication > 0
            assert (parts.waiting > 0) == (word == "ddp-shm")
            assert parts.hidden < parts.backward + parts.communication
        # eight layers of 0.26 MB: in several buckets, but for DDP's first step, all but one early
        assert all((parts.hidden > 0) == (word in HIDES) for _, parts in timings[1:])
