"""Faults strike the right rank, as hard as asked for, in every strategy."""

import itertools
import re
import statistics
import time

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark
from ddpnb.rank.meter import Timer
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.training import loop, validation
from ddpnb.rank.training.context import build_context
from ddpnb.rank.training.fault_injection import FaultInjector, notes
from tests.rank import runs
from tests.rank.ranks import make_state
from tests.rank.runs import header_of, losses, marks_of, steps_of, train_job
from tests.rank.sources import HEAVY


def spec_of(strategy: str, **changes):
    return runs.spec_of(strategy, **{"batch_size": 40} | changes)


def step_seconds(result) -> float:
    """Return how long a step usually takes."""
    ends = [event.seconds for event in steps_of(result)]
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends))


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_one_slow_worker_holds_up_all_that_wait_for_it(ranks, strategy):
    usual = ranks(2).call(train_job, spec_of(strategy, source=HEAVY))
    late = ranks(2).call(train_job, spec_of(strategy, source=HEAVY, slow=("1:10x",)))
    assert step_seconds(late[0]) > 1.5 * step_seconds(usual[0])
    if strategy == "ddp":  # its ranks are in step
        assert step_seconds(late[0]) == pytest.approx(step_seconds(late[1]), rel=0.5)
    assert [mark for result in late for mark in marks_of(result)] == [(1, "10x slower")]
    assert any("Rank 1" in note for note in header_of(late[0]).notes)


def test_asynchronous_workers_do_not_wait_and_what_a_slow_one_has_read_grows_old(ranks):
    fast, slow = ranks(2).call(train_job, spec_of("async", slow=("1:50ms",), num_epochs=200))
    assert fast[0].num_steps > slow[0].num_steps > 2
    assert step_seconds(slow) > max(0.05, step_seconds(fast))
    assert marks_of(slow) == [(1, "50 ms slower")]
    assert statistics.median(e.staleness for e in steps_of(slow)) > 3
    assert statistics.median(e.staleness for e in steps_of(fast)) <= 1


def test_a_fixed_delay_counts_as_computing(ranks):
    first, second = ranks(2).call(train_job, spec_of("ddp", slow=("1:50ms",)))
    assert step_seconds(first) > 0.045  # it waits for the other
    assert step_seconds(second) > 0.045
    usually = [statistics.median(e.parts.forward for e in steps_of(r)) for r in (first, second)]
    assert usually[1] > max(0.045, usually[0])


def test_two_slow_ranks_do_not_slow_each_other_down_for_ever(ranks):
    spec = spec_of("ddp", source=HEAVY, slow=("0:2x", "1:3x"), num_epochs=3)
    ends = [event.seconds for event in steps_of(ranks(2).call(train_job, spec)[0])]
    half = len(ends) // 2
    assert (ends[-1] - ends[half]) < 3 * (ends[half] - ends[0])


def test_what_is_learnt_does_not_depend_on_the_delay(ranks):
    usual, uneven = (
        ranks(1).call(train_job, spec_of("ddp", num_epochs=1, **fault))[0]
        for fault in ({}, {"jitter": 0.5, "slow": ("0:2x",)})
    )
    assert losses(usual) == losses(uneven)
    assert any("50 %" in note for note in header_of(uneven).notes)


def test_jitter_comes_from_the_seed():
    def delays(seed: int) -> list[float]:
        spec = spec_of("ddp", jitter=0.2, seed=seed)
        context = build_context(spec, make_state(1, 2), {}, filename="here")
        injector = FaultInjector(context, Timer(), lambda _: None)
        injector._compute_seconds = 1.0
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


def test_a_rank_dies_when_it_should_and_says_so_before(fresh_ranks, tmp_path):
    group = fresh_ranks(2)
    spec = spec_of("ddp", num_epochs=1e6, kill=("1@1s",), slow=("0:10ms",))
    marks = tmp_path / "marks"
    began = time.monotonic()
    results = group.attempt(kill_job, spec, marks)
    assert time.monotonic() - began < 45
    assert "died" in str(results[1])
    rank, text, seconds = marks.read_text().split()
    assert (rank, text) == ("1", "killed")
    assert 1.0 <= float(seconds) < 3.0
    assert results[0] is not None  # it noticed


DDP = Plan(num_ranks=2, num_workers=2, synchronous=True)
SINGLE = Plan(num_ranks=1, num_workers=1, synchronous=True)


@pytest.mark.parametrize(
    ("plan", "faults", "said"),
    [
        (DDP, {"slow": ("1:3x",)}, ["Rank 1 is 3x"]),
        (SINGLE, {"slow": ("1:3x",), "kill": ("0@5s",)}, ["Rank 1 takes no part", "Rank 0 .* 5 s"]),
        (DDP, {"kill": ("1@5s", "0@100ms")}, ["Rank 1 .* 5 s", r"Rank 0 .* 0\.1 s"]),
    ],
)
def test_notes_say_what_strikes_and_what_has_no_effect(plan, faults, said):
    found = notes(spec_of("ddp", **faults), plan)
    assert [bool(re.match(*each)) for each in zip(said, found, strict=True)] == [True] * len(said)


@pytest.mark.parametrize("faults", [{"slow": ("7:3x",)}, {"kill": ("7@1s",)}])
def test_a_rank_that_is_not_there_is_refused(faults):
    with pytest.raises(UserError, match="no rank 7"):
        validation.validate(spec_of("ddp", **faults), state=make_state(0, 2), namespace={})
