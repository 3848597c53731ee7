"""Do the parts of a step add up to it, and is there time for what was sent, in every strategy?"""

import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import StepEvent
from tests.rank.test_options import spec_of, train_job

INSIDE = ("hogwild",)
"""Strategies that exchange inside another part: the optimizer's update."""


def all_steps(ranks, strategy: str) -> list[list[StepEvent]]:
    """Train on two ranks; return the steps of each, in order."""
    results = ranks(2).call(train_job, spec_of(strategy, num_epochs=3))
    found = [[e for e in events if isinstance(e, StepEvent)] for _, events in results]
    assert any(found)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_add_up_to_the_step_but_for_what_is_hidden(ranks, strategy):
    for steps in all_steps(ranks, strategy):
        before = 0.0
        for step in steps:
            spent = sum(step.parts) - step.parts.hidden
            assert spent == pytest.approx(step.seconds - before, abs=1e-6)
            assert min(step.parts) >= 0
            assert step.parts.forward > 0
            assert step.parts.backward > 0
            before = step.seconds


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in INSIDE])
def test_who_sends_takes_time_for_it(ranks, strategy):
    steps = [step for rank in all_steps(ranks, strategy) for step in rank]
    for step in steps:
        if step.num_bytes_sent:
            assert step.parts.communication + step.parts.waiting > 0
    assert any(step.num_bytes_sent for step in steps) == (strategy not in ("single", "no-comm"))
