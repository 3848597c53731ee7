"""Do the steps before the measured ones leave no trace, and are they made on what is measured?"""

import math
from collections.abc import Iterable

import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import RunReport, StepEvent
from ddpnb.rank.strategies import fsdp
from ddpnb.rank.training import loop
from tests.rank.ranks import make_state
from tests.rank.test_loop import ASYNCHRONOUS, run_job, spec_of
from tests.rank.test_loop import CELL as PLAIN

CELL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        made.append(self)
        self.first, self.norm, self.last = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.dropout = nn.Dropout(0.1)
        self.num_calls, self.seen = 0, []

    def forward(self, inputs):
        self.num_calls += 1
        self.seen.append(self.num_calls)
        scale = 1 + 0.01 * len(self.seen)
        return self.last(scale * self.dropout(torch.relu(self.norm(self.first(inputs)))))

def model():
    return Model()

def data(split):
    x = torch.randn(200 if split == "train" else 50, 4)
    return x, (x.sum(dim=1) > 0).long()
"""
SCHEDULED = """
def optimizer(params):
    optimizer = torch.optim.Adam(params, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
"""
OWN = """
class Averaging:
    def setup(self, replica):
        self.replica = replica
        self.optimizer = replica.optimizer(replica.parameters)

    def step(self, batch):
        loss = self.replica.compute_gradients(batch, weight=batch.weight)
        for parameter in self.replica.parameters:
            torch.distributed.all_reduce(parameter.grad)
        self.replica.update(self.optimizer)
        return loss

    def finish(self):
        return self.replica.model
"""
SYNCHRONOUS = [
    name
    for name in STRATEGIES
    if name not in ASYNCHRONOUS and (name != "fsdp" or fsdp.is_supported())
]
REPEATABLE = [
    *((name, 2) for name in SYNCHRONOUS),
    *((name, 2) for name in ("ddp:hook=powersgd", "gossip:together=on")),
    *((name, 1) for name in (*ASYNCHRONOUS, "async:period=2", "async:bound=0")),
    ("local-sgd:every=2", 2),
    ("diloco:every=2", 2),
]
"""Strategies, and how many ranks of each make the same steps every time."""


def spec_for(strategy: str, num_steps: int, *more: str, **changes):
    # One thread of dp counts the calls of each replica; dropout draws in any order there.
    source = CELL.replace("nn.Dropout(0.1)", "nn.Identity()") if strategy == "dp" else CELL
    return spec_of(strategy, source="".join([source, *more]), num_warmup_steps=num_steps, **changes)


def trained(state, folder, spec) -> tuple[RunReport, list[StepEvent], int]:
    """Train it; return the report, the steps, and how many models the rank has made."""
    events: list[object] = []
    made: list[object] = []
    report = loop.run(
        spec,
        state=state,
        folder=folder,
        publish=events.append,
        namespace={"made": made},
        should_stop=lambda: False,
    )
    return report, [event for event in events if isinstance(event, StepEvent)], len(made)


def numbers(results: Iterable[tuple[RunReport, list[StepEvent], int]]) -> list[object]:
    """What must be the same to the bit."""
    found = []
    for report, steps, _ in results:
        scores = (report.final_loss, report.held_out_loss, report.num_steps, report.num_samples)
        found.append([None if math.isnan(value) else value for value in scores])
        found.append([(step.step, step.loss, step.num_samples, step.staleness) for step in steps])
    return found


@pytest.mark.parametrize(("strategy", "num_ranks"), REPEATABLE)
def test_it_changes_nothing_that_is_measured(ranks, strategy, num_ranks):
    more = () if strategy.startswith("zero") else (SCHEDULED,)
    with_it, without = (
        ranks(num_ranks).call(trained, spec_for(strategy, num, *more)) for num in (3, 0)
    )
    assert numbers(with_it) == numbers(without)


def test_the_server_of_several_begins_anew(ranks):
    """Without dropout and BatchNorm it does not matter who trains on which shard of a round."""
    plain = PLAIN.replace("nn.Dropout(0.1), ", "")
    with_it, without = (
        ranks(2).call(run_job, spec_of("async:bound=0", source=plain, num_warmup_steps=num))[0][0]
        for num in (3, 0)
    )
    assert with_it.final_loss == without.final_loss


@pytest.mark.parametrize("changes", [{"num_lr_warmup_epochs": 1.0, "clip": 0.5}, {"accumulate": 2}])
def test_it_counts_no_update(ranks, changes):
    with_it, without = (ranks(2).call(trained, spec_for("ddp", num, **changes)) for num in (3, 0))
    assert numbers(with_it) == numbers(without)


@pytest.mark.parametrize("strategy", ["ddp", "async", "hogwild", "gossip"])
def test_the_replica_that_is_measured_makes_the_steps(ranks, strategy):
    assert [made for _, _, made in ranks(2).call(trained, spec_for(strategy, 3))] == [1, 1]


def test_a_class_of_ones_own_is_rehearsed_on_a_replica_of_its_own(ranks):
    for num_steps, expected in ((3, [2, 2]), (0, [1, 1])):
        results = ranks(2).call(trained, spec_for("Averaging", num_steps, OWN))
        assert [made for _, _, made in results] == expected


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
def test_all_shards_are_trained_on_once_whoever_rehearses(ranks, strategy):
    results = ranks(3).call(run_job, spec_of(strategy, num_epochs=0.1))  # one batch: 3 shards
    assert sum(report.num_samples for report, _ in results) == 32
    stale = [e.staleness for _, events in results for e in events if isinstance(e, StepEvent)]
    assert max(stale) <= 2


@pytest.mark.parametrize("strategy", ["Averaging", "no-comm"])
def test_what_follows_the_last_step_counts_where_it_is_a_part_of_the_training(ranks, strategy):
    late = OWN.replace(
        "        return self.replica.model", "        import time\n        time.sleep(0.3)"
    )
    for report, steps, _ in ranks(2).call(trained, spec_for(strategy, 0, late)):
        if strategy == "Averaging":
            assert report.seconds >= steps[-1].seconds + 0.3
        else:  # only has the model collected
            assert report.seconds == steps[-1].seconds


def test_as_many_epochs_as_a_least_time_needs_are_planned():
    """By steps without communication: what is measured is a part of what is trained."""
    planned = [
        loop.validate(
            spec_of("ddp", min_seconds=seconds), state=make_state(0, 2), namespace={}
        ).num_epochs
        for seconds in (None, 1.0, 10_000.0)
    ]
    assert planned[0] == 0
    assert 0 < planned[1] < planned[2]


def test_a_ceiling_ends_after_four_seconds_and_is_not_judged(ranks):
    spec = spec_of("no-comm", num_epochs=20_000, is_ceiling=True)
    results = ranks(2).call(run_job, spec)
    header = results[0][1][0]
    for report, _ in results:
        assert loop.CEILING_SECONDS <= report.seconds < 30
        assert not report.was_stopped
        assert math.isnan(report.final_loss)
    assert 0 < header.num_samples <= 20_000 * 200
    assert header.notes == ("The ceiling: trained only as long as its rate needs, and not judged.",)
    short = ranks(2).call(run_job, spec_of("no-comm", is_ceiling=True))
    assert sum(report.num_samples for report, _ in short) == 600  # the run is shorter
