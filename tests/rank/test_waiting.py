"""Do the parts of a step add up to it, and is waiting timed apart from computing?"""

import statistics

import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import RunSpec, StepEvent
from tests.rank.test_options import train_job

DELAY_SECONDS = 0.15
WAITING = ["ddp", "ddp-shm", "ddp-overlap-by-hand", "local-sgd:every=2", "zero", "fsdp"]
"""Strategies in which ranks wait for the slowest, one of each kind."""


def all_steps(group, strategy: str, **changes) -> list[list[StepEvent]]:
    """The steps of every rank that trains."""
    values = {"task": "digits", "num_epochs": 1, "batch_size": 64} | changes
    results = group.call(train_job, RunSpec(run_id="parts", strategy=strategy, **values))
    found = [[event for event in events if isinstance(event, StepEvent)] for _, events in results]
    return [steps for steps in found if steps]


def steps_of(group, strategy: str, **changes) -> list[list[StepEvent]]:
    """The same without the first, which may be a cold one."""
    return [steps[1:] for steps in all_steps(group, strategy, **changes)]


def middle(steps: list[StepEvent], *names: str) -> float:
    """Seconds of a usual step that went into these parts."""
    return statistics.median(sum(getattr(e.parts, name) for name in names) for e in steps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_add_up_to_the_step_but_for_what_is_hidden(ranks, strategy):
    found = all_steps(ranks(2), strategy)
    for steps in found:
        before = 0.0
        for step in steps:
            assert sum(step.parts) - step.parts.hidden == pytest.approx(
                step.seconds - before, abs=1e-6
            )
            assert min(step.parts) >= 0
            assert step.parts.forward > 0 < step.parts.backward
            before = step.seconds
            # hogwild exchanges inside the optimizer's update
            if step.num_bytes_sent and strategy != "hogwild":
                assert step.parts.communication + step.parts.waiting > 0
    sends = any(step.num_bytes_sent for steps in found for step in steps)
    assert sends == (strategy not in ("single", "no-comm"))


@pytest.mark.parametrize("strategy", WAITING)
def test_to_wait_for_a_slow_rank_is_no_computing(ranks, strategy):
    delay = 3 * DELAY_SECONDS  # far longer than a busy machine computes
    late = (f"1:{round(1000 * delay)}ms",)
    prompt, slow = steps_of(ranks(2), strategy, slow=late, batch_size=256)
    waited = statistics.fmean(e.parts.communication + e.parts.waiting for e in prompt)
    assert waited > 0.6 * delay
    assert middle(prompt, "data", "forward", "backward", "optimizer") < 0.6 * delay
    assert middle(slow, "forward") > delay
