"""Injected faults affect the right rank by the requested amount."""

import itertools
import statistics

import pytest

from tests.cells import HEAVY
from tests.rank.runs import header_of, losses, marks_of, spec_of, steps_of, train_job


def step_seconds(result) -> float:
    """Return the first quartile of step times, which other programs hardly slow down."""
    ends = [event.seconds for event in steps_of(result)]
    return statistics.quantiles((end - begin for begin, end in itertools.pairwise(ends)), n=4)[0]


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_slow_workers_hold_up_all_that_wait_for_them_and_no_more_with_time(ranks, strategy):
    slow, chosen = ("0:2x", "1:5x"), {"source": HEAVY, "num_epochs": 1}
    for _ in range(3):  # a busy machine may slow the usual run too
        usual = ranks(2).call(train_job, spec_of(strategy, **chosen))
        late = ranks(2).call(train_job, spec_of(strategy, slow=slow, **chosen))
        if is_slower := step_seconds(late[0]) > 1.5 * step_seconds(usual[0]):
            break
    assert is_slower
    if strategy == "ddp":  # its ranks step together
        assert step_seconds(late[0]) == pytest.approx(step_seconds(late[1]), rel=0.5)
    marks = [mark for result in late for mark in marks_of(result)]
    assert sorted(marks) == [(0, "2x slower"), (1, "5x slower")]
    assert any("Rank 1" in note for note in header_of(late[0]).notes)
    ends = [event.seconds for event in steps_of(late[0])]
    half = len(ends) // 2
    assert (ends[-1] - ends[half]) < 3 * (ends[half] - ends[0])


DELAY_SECONDS = 0.45
"""A delay that is far longer than the computation, even on a busy machine."""


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd:every=2", "fsdp"])
def test_to_wait_for_a_slow_rank_is_no_computing(ranks, strategy):
    late = (f"1:{round(1000 * DELAY_SECONDS)}ms",)
    spec = spec_of(strategy, slow=late, batch_size=100, num_epochs=2)
    prompt, slow = (steps_of(result)[1:] for result in ranks(2).call(train_job, spec))
    waited = statistics.fmean(e.parts.communication + e.parts.waiting for e in prompt)
    assert waited > 0.6 * DELAY_SECONDS
    assert middle(prompt, "data", "forward", "backward", "optimizer") < 0.6 * DELAY_SECONDS
    assert middle(slow, "forward") > DELAY_SECONDS


def middle(steps: list, *names: str) -> float:
    """Return the median seconds of a step in these parts."""
    return statistics.median(sum(getattr(e.parts, name) for name in names) for e in steps)


def test_what_is_learnt_does_not_depend_on_the_delay(ranks):
    usual, uneven = (
        ranks(1).call(train_job, spec_of("ddp", num_epochs=1, **fault))[0]
        for fault in ({}, {"jitter": 0.5, "slow": ("0:2x",)})
    )
    assert losses(usual) == losses(uneven)
    assert any("50 %" in note for note in header_of(uneven).notes)
