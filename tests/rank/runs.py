"""Runs of one training on real ranks, and what comes of them."""

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ddpnb.protocol.messages import Mark, RunHeader, RunSpec, StepEvent
from ddpnb.rank.training import loop, validation
from tests.rank.sources import CELL

FEATURED = ["ddp", "fsdp", "async", "dp"]
"""Strategies that between them have every way in which the loop treats one."""
ASYNCHRONOUS = ("async", "hogwild")


def spec_of(strategy: str, **changes: Any) -> RunSpec:
    values = {"run_id": "run-1", "source": CELL, "num_epochs": 2, "batch_size": 32}
    return RunSpec(strategy=strategy, **values | changes)


def train_job(state, folder, spec, stop_at=math.inf, stop_ranks=(0,)):
    """Run it; return its report and all that it published."""
    events: list[Any] = []
    report = loop.run(
        spec,
        state=state,
        folder=folder,
        publish=events.append,
        namespace={},
        should_stop=lambda: state.rank in stop_ranks and len(events) > stop_at,
    )
    return report, events


def run_job(state, folder, spec, stop_at=math.inf, stop_ranks=(0,)):
    """Run it, and see that no trace is left."""
    numbers = []
    for runs in (False, True):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        result = train_job(state, folder, spec, stop_at, stop_ranks) if runs else None
        numbers.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert numbers[0] == numbers[1]
    assert torch.get_num_threads() == 1
    torch.distributed.barrier()
    assert {path.name for path in folder.iterdir()} <= {validation.CHECKS}
    return result


def check_job(state, folder, spec):
    return validation.validate(spec, state=state, namespace={}, folder=folder)


def header_of(result) -> RunHeader:
    (found,) = [event for event in result[1] if isinstance(event, RunHeader)]
    return found


def steps_of(result) -> list[StepEvent]:
    return [event for event in result[1] if isinstance(event, StepEvent)]


def marks_of(result) -> list[tuple[int, str]]:
    return [(mark.rank, mark.text) for mark in result[1] if isinstance(mark, Mark)]


def losses(result) -> list[float]:
    return [step.loss for step in steps_of(result)]


def total_losses(results) -> list[float]:
    """The mean loss of each global batch, over all workers."""

    def means() -> Iterator[float]:
        steps = [step for result in results for step in steps_of(result)]
        for number in sorted({step.step for step in steps}):
            mine = [step for step in steps if step.step == number]
            yield sum(s.loss * s.num_samples for s in mine) / sum(s.num_samples for s in mine)

    return list(means())


def unzip(results):
    reports, events = zip(*results, strict=True)
    return reports, events
