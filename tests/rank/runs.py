"""Runs of one training on real ranks, and functions that read their results."""

import itertools
import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from ddpnb.protocol.messages import Mark, RunHeader, RunSpec, StepEvent
from ddpnb.rank.training import loop
from ddpnb.rank.training.run import Surroundings
from tests.cells import CELL

FEATURED = ["ddp", "fsdp", "async", "dp"]
"""Strategies that together exercise every case of the training loop."""
ASYNCHRONOUS = ("async", "hogwild")


def spec_of(strategy: str, **changes: Any) -> RunSpec:
    values = {"run_id": "run-1", "source": CELL, "num_epochs": 3, "batch_size": 32}
    return RunSpec(strategy=strategy, **values | changes)


def train_job(state, folder, spec, stop_at=math.inf, stop_ranks=(0,)):
    """Run a spec, check that it leaves no trace, and return its report and published events."""
    events: list[Any] = []
    before = random_state()
    report = loop.train(
        spec,
        Surroundings(state=state, folder=folder),
        publish=events.append,
        should_stop=lambda: state.rank in stop_ranks and len(events) > stop_at,
    )
    assert random_state() == before
    assert torch.get_num_threads() == 1
    torch.distributed.barrier()
    assert list(folder.iterdir()) == []
    return report, events


def random_state() -> tuple[Any, ...]:
    _, key, position, *_ = np.random.get_state()
    return random.getstate(), key.tolist(), position, torch.get_rng_state().tolist()


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
    """Return the mean loss of each global batch over all workers."""
    batches: dict[int, list[StepEvent]] = defaultdict(list)
    for step in itertools.chain.from_iterable(map(steps_of, results)):
        batches[step.step].append(step)
    return [
        sum(s.loss * s.num_samples for s in mine) / sum(s.num_samples for s in mine)
        for _, mine in sorted(batches.items())
    ]
