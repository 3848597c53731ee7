"""Faults strike the right rank, as hard as asked for, in every strategy."""

import itertools
import statistics
import time

import pytest
import torch

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark, RunHeader, RunSpec, StepEvent
from ddpnb.rank.meter import NullTimer
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.training import loop
from ddpnb.rank.training.fault_injection import FaultInjector, notes
from tests.rank.ranks import make_state
from tests.rank.test_options import CELL, train_job

HEAVY = """
import torch
from torch import nn

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 256), nn.Linear(256, 2)
        self.again = nn.Linear(256, 256)

    def forward(self, x):
        x = self.first(x)
        for _ in range(100):
            x = torch.tanh(self.again(x))
        return self.last(x)

model = Deep

def data(split):
    x = torch.randn(200 if split == "train" else 50, 4)
    return x, (x.sum(dim=1) > 0).long()
"""
"""Computing takes far longer than anything else in its steps."""


def spec_of(strategy: str, **changes) -> RunSpec:
    values = {"run_id": "run-1", "source": CELL, "num_epochs": 2, "batch_size": 40}
    return RunSpec(strategy=strategy, **values | changes)


def steps(result) -> list[StepEvent]:
    return [event for event in result[1] if isinstance(event, StepEvent)]


def step_seconds(result) -> float:
    """Return how long a step usually takes."""
    ends = [event.seconds for event in steps(result)]
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends))


def marks(result) -> list[tuple[int, str]]:
    return [(mark.rank, mark.text) for mark in result[1] if isinstance(mark, Mark)]


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_one_slow_worker_holds_up_all_that_wait_for_it(ranks, strategy):
    usual = ranks(2).call(train_job, spec_of(strategy, source=HEAVY))
    late = ranks(2).call(train_job, spec_of(strategy, source=HEAVY, slow=("1:10x",)))
    assert step_seconds(late[0]) > 1.5 * step_seconds(usual[0])
    if strategy == "ddp":  # its ranks are in step
        assert step_seconds(late[0]) == pytest.approx(step_seconds(late[1]), rel=0.5)
    assert [mark for result in late for mark in marks(result)] == [(1, "10x slower")]
    (header,) = [event for event in late[0][1] if isinstance(event, RunHeader)]
    assert "Rank 1 is 10x slower on purpose." in header.notes


def test_asynchronous_workers_do_not_wait_for_the_slow_one(ranks):
    fast, slow = ranks(2).call(train_job, spec_of("async", slow=("1:20ms",), num_epochs=400))
    assert fast[0].num_steps > slow[0].num_steps > 2
    assert step_seconds(slow) > max(0.02, step_seconds(fast))
    assert marks(slow) == [(1, "20 ms slower")]


@pytest.mark.parametrize("strategy", ["async", "hogwild"])
def test_what_a_slow_worker_has_read_grows_old(ranks, strategy):
    spec = spec_of(strategy, slow=("1:50ms",), num_epochs=200)
    fast, slow = ranks(2).call(train_job, spec)
    assert statistics.median(e.staleness for e in steps(slow)) > 3
    assert statistics.median(e.staleness for e in steps(fast)) <= 1


def test_a_fixed_delay_counts_as_computing(ranks):
    first, second = ranks(2).call(train_job, spec_of("ddp", slow=("1:50ms",)))
    assert step_seconds(first) > 0.045  # it waits for the other
    assert step_seconds(second) > 0.045
    usually = [statistics.median(e.parts.forward for e in steps(r)) for r in (first, second)]
    assert usually[1] > max(0.045, usually[0])


def test_two_slow_ranks_do_not_slow_each_other_down_for_ever(ranks):
    spec = spec_of("ddp", source=HEAVY, slow=("0:2x", "1:3x"), num_epochs=3)
    ends = [event.seconds for event in steps(ranks(2).call(train_job, spec)[0])]
    half = len(ends) // 2
    assert (ends[-1] - ends[half]) < 3 * (ends[half] - ends[0])


def test_single_knows_only_its_own_rank(ranks):
    other = ranks(2).call(train_job, spec_of("single", slow=("1:50ms",)))[0]
    assert marks(other) == []
    own = ranks(2).call(train_job, spec_of("single", slow=("0:50ms",)))[0]
    assert step_seconds(own) > max(0.05, step_seconds(other))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_learnt_does_not_depend_on_the_delay(ranks, strategy):
    usual, uneven = (
        ranks(1).call(train_job, spec_of(strategy, num_epochs=1, **fault))[0]
        for fault in ({}, {"jitter": 0.5, "slow": ("0:2x",)})
    )
    assert [e.loss for e in steps(usual)] == [e.loss for e in steps(uneven)]
    notes = next(event.notes for event in uneven[1] if isinstance(event, RunHeader))
    assert "Steps take up to 50 % longer at random, on purpose." in notes


def test_jitter_comes_from_the_seed():
    def delays(seed: int) -> list[float]:
        injector = FaultInjector(
            spec_of("ddp", jitter=0.2, seed=seed),
            [1],
            compute_seconds=lambda: 1.0,
            device=torch.device("cpu"),
            timer=NullTimer(),
            publish=lambda _: None,
        )
        return [injector._delay(1) for _ in range(50)]

    assert delays(0) == delays(0) != delays(1)
    assert 0 <= min(delays(0)) < 0.05 < 0.15 < max(delays(0)) <= 0.2


def kill_job(state, folder, spec, marks_file):
    """Train; write to a file what is published, for this process may be killed."""
    began = time.monotonic()

    def publish(event):
        if isinstance(event, Mark):
            marks_file.write_text(f"{event.rank} {event.text} {event.seconds}")

    loop.run(
        spec,
        state=state,
        folder=folder,
        publish=publish,
        namespace={},
        should_stop=lambda: time.monotonic() - began > 60,
    )


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_rank_dies_when_it_should_and_says_so_before(fresh_ranks, tmp_path, strategy):
    group = fresh_ranks(2)
    spec = spec_of(strategy, num_epochs=1e6, kill=("1@1s",), slow=("0:10ms",))
    marks = tmp_path / "marks"
    began = time.monotonic()
    results = group.attempt(kill_job, spec, marks)
    assert time.monotonic() - began < 45
    victim = 0 if strategy == "dp" else 1  # all of dp's replicas live in rank 0
    assert "died" in str(results[victim])
    rank, text, seconds = marks.read_text().split()
    assert (rank, text) == ("1", "killed")
    assert 1.0 <= float(seconds) < 3.0
    assert victim == 0 or results[0] is not None  # it noticed


def test_nobody_dies_after_the_run(ranks):
    results = ranks(2).call(train_job, spec_of("ddp", kill=("1@30s",)))
    assert all(report.took_part for report, _ in results)


DP = Plan(num_ranks=1, num_workers=2, synchronous=True)
DDP = Plan(num_ranks=2, num_workers=2, synchronous=True)
SINGLE = Plan(num_ranks=1, num_workers=1, synchronous=True)


@pytest.mark.parametrize(
    ("plan", "faults", "expected"),
    [
        (DDP, {"slow": ("1:3x",)}, ["Rank 1 is 3x slower on purpose."]),
        (SINGLE, {"slow": ("1:3x",)}, ["--slow 1:3x has no effect: rank 1 takes no part."]),
        (SINGLE, {"kill": ("1@5s",)}, ["--kill 1@5s has no effect: rank 1 takes no part."]),
        (
            DDP,
            {"kill": ("1@5s", "0@100ms")},
            [
                "Rank 1 is to be killed after 5 s of training, on purpose.",
                "Rank 0 is to be killed after 0.1 s of training, on purpose.",
            ],
        ),
        (
            DP,
            {"kill": ("0@5s", "1@2s")},
            [
                "Rank 1 is to be killed after 2 s of training, on purpose; "
                "here it is a thread of rank 0, whose process dies with it."
            ],
        ),
    ],
)
def test_notes_say_what_strikes_and_what_has_no_effect(plan, faults, expected):
    assert list(notes(spec_of("ddp", **faults), plan)) == expected


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"slow": ("7:3x",)}, "--slow 7:3x: there is no rank 7; the ranks are 0-1."),
        ({"kill": ("2@1s",)}, "--kill 2@1s: there is no rank 2; the ranks are 0-1."),
    ],
)
def test_a_rank_that_is_not_there_is_refused(faults, expected):
    with pytest.raises(UserError, match=expected):
        loop.validate(spec_of("ddp", **faults), state=make_state(0, 2), namespace={})
