"""Do the parts of a step add up to it, and is waiting timed apart from computing?"""

import statistics

import pytest

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.messages import StepEvent
from tests.rank.runs import spec_of, steps_of, train_job

DELAY_SECONDS = 0.45
"""Far longer than a busy machine computes."""
WAITING = ["ddp", "ddp-shm", "ddp-overlap-by-hand", "local-sgd:every=2", "zero", "fsdp"]
"""Strategies in which ranks wait for the slowest, one of each kind."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_add_up_to_the_step_but_for_what_is_hidden(ranks, strategy):
    results = ranks(2).call(train_job, spec_of(strategy))
    for steps in map(steps_of, results):
        before = 0.0
        for step in steps:
            exclusive = sum(step.parts) - step.parts.hidden
            assert exclusive == pytest.approx(step.seconds - before, abs=1e-6)
            assert min(step.parts) >= 0
            assert step.parts.forward > 0 < step.parts.backward
            before = step.seconds
            # hogwild exchanges inside the optimizer's update
            if step.num_bytes_sent and strategy != "hogwild":
                assert step.parts.communication + step.parts.waiting > 0
    sends = any(step.num_bytes_sent for result in results for step in steps_of(result))
    assert sends == (strategy not in ("single", "no-comm"))


@pytest.mark.parametrize("strategy", WAITING)
def test_to_wait_for_a_slow_rank_is_no_computing(ranks, strategy):
    late = (f"1:{round(1000 * DELAY_SECONDS)}ms",)
    spec = spec_of(strategy, slow=late, batch_size=100)
    prompt, slow = (steps_of(result)[1:] for result in ranks(2).call(train_job, spec))
    waited = statistics.fmean(e.parts.communication + e.parts.waiting for e in prompt)
    assert waited > 0.6 * DELAY_SECONDS
    assert middle(prompt, "data", "forward", "backward", "optimizer") < 0.6 * DELAY_SECONDS
    assert middle(slow, "forward") > DELAY_SECONDS


def middle(steps: list[StepEvent], *names: str) -> float:
    """Seconds of a usual step that went into these parts."""
    return statistics.median(sum(getattr(e.parts, name) for name in names) for e in steps)
