"""Is waiting timed apart from computing, in every strategy?"""

import itertools
import statistics

import pytest

from ddpnb.protocol.messages import RunSpec, StepEvent
from ddpnb.rank.training import loop

DELAY_SECONDS = 0.15
SHARDED = ("fsdp", "fsdp:reshard=off")
WAITING = (
    "ddp",
    "ddp-shm",
    "ddp-by-hand",
    "ddp-overlap-by-hand",
    "ring-by-hand",
    "central",
    "local-sgd:every=2",
    "diloco:every=2",
    "zero",
    *SHARDED,
)
"""Strategies in which ranks wait for the slowest."""

BATCHNORM = """
import time
import torch
from torch import nn

class Late(torch.utils.data.Dataset):
    def __init__(self, num):
        self.inputs = torch.randn(num, 4)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if torch.distributed.get_rank() == 0:
            time.sleep(0.15 / 32)
        return self.inputs[index], int(self.inputs[index].sum() > 0)

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

def data(split):
    return Late(192 if split == "train" else 2)
"""
LATE_UPDATE = """
import time
import torch
from torch import nn

class Late(torch.optim.SGD):
    def step(self, *args):
        if torch.distributed.get_rank() == 1:
            time.sleep(0.15)
        return super().step(*args)

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

def data(split):
    x = torch.randn(200, 4)
    return x, (x.sum(dim=1) > 0).long()

def optimizer(parameters):
    return Late(parameters, lr=0.1)
"""


def steps_job(state, folder, spec) -> list[StepEvent]:
    """Train; return the steps of this rank but the first, which may be a cold one."""
    events = []
    loop.run(
        spec,
        state=state,
        folder=folder,
        publish=events.append,
        namespace={},
        should_stop=lambda: False,
    )
    return [event for event in events if isinstance(event, StepEvent)][1:]


def steps_of(group, strategy: str, **changes) -> list[list[StepEvent]]:
    """The steps of every rank that trains."""
    values = {"task": "digits", "num_epochs": 1, "batch_size": 64} | changes
    results = group.call(steps_job, RunSpec(run_id="parts", strategy=strategy, **values))
    return [steps for steps in results if steps]


def middle(steps: list[StepEvent], *names: str) -> float:
    """Seconds of a usual step that went into these parts."""
    return statistics.median(sum(getattr(e.parts, name) for name in names) for e in steps)


@pytest.mark.parametrize("strategy", WAITING)
def test_to_wait_for_a_slow_rank_is_no_computing(ranks, strategy):
    delay = 3 * DELAY_SECONDS  # far longer than a busy machine computes
    late = (f"1:{round(1000 * delay)}ms",)
    prompt, slow = steps_of(ranks(2), strategy, slow=late, batch_size=256)
    waited = statistics.fmean(e.parts.communication + e.parts.waiting for e in prompt)
    assert waited > 0.6 * delay
    assert middle(prompt, "data", "forward", "backward", "optimizer") < 0.6 * delay
    assert middle(slow, "forward") > delay


@pytest.mark.parametrize("strategy", ["ddp", "ddp-shm", "zero", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_to_wait_for_rank_0s_buffers_is_no_computing(ranks, strategy, accumulate):
    changes = {"task": "cell", "source": BATCHNORM, "accumulate": accumulate}
    late, prompt = steps_of(ranks(2), strategy, **changes)
    assert middle(prompt, "communication", "waiting") > 0.6 * DELAY_SECONDS
    assert middle(prompt, "data", "forward", "backward", "optimizer") < 0.6 * DELAY_SECONDS
    assert middle(late, "data") > DELAY_SECONDS


def test_zero_exchanges_updates_as_communication(ranks):
    changes = {"task": "cell", "source": LATE_UPDATE}
    prompt, late = steps_of(ranks(2), "zero", **changes)
    assert middle(prompt, "communication") > 0.6 * DELAY_SECONDS > middle(prompt, "optimizer")
    assert middle(late, "optimizer") > DELAY_SECONDS


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"clip": 0.1}])
def test_gathers_and_scatters_are_communication(ranks, strategy, changes):
    for steps in steps_of(ranks(2), strategy, **changes):
        for before, step in itertools.pairwise(steps):
            spent = sum(step.parts) - step.parts.hidden
            assert spent == pytest.approx(step.seconds - before.seconds, abs=1e-6)
        assert all(step.parts.communication > 0 for step in steps)
        assert all(step.parts.forward > 0 < step.parts.backward for step in steps)


@pytest.mark.parametrize("strategy", ["zero", *SHARDED])
def test_one_rank_alone_sends_nothing(ranks, strategy):
    (steps,) = steps_of(ranks(1), strategy)
    assert {step.num_bytes_sent for step in steps} == {0}
    assert all(step.parts.optimizer > 0 for step in steps)
