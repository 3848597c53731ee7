"""One rank of a plain torch.distributed script, in a network namespace of its own.

    python -m tests.rank.shaped RANK FOLDER ADDRESS

Prints the step times of each of ``TRAININGS`` as JSON.  No link is emulated here.
"""

import json
import os
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddpnb.protocol.messages import RankState, RunSpec, StepEvent
from ddpnb.rank.training import loop
from tests.rank.ranks import make_state

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 2))

def data(split):
    x = torch.randn(128, 8)
    return x, (x.sum(dim=1) > 0).long()
"""
"""A million floats, which take 0.32 s at 100 Mbit/s; it computes for hundredths of that."""

TRAININGS = {
    "ddp": {"slow": ("0:100ms", "1:100ms")},
    "local-sgd:every=2": {"slow": ("0:100ms", "1:100ms")},
    # rank 0, beside the server, would else take nearly all the samples
    "async": {"slow": ("0:600ms",), "num_epochs": 2},
}
"""With steps that sleep, so that it does not matter how busy the machine is."""


def step_seconds(state: RankState, folder: Path, link: str = "") -> dict[str, float]:
    """Return the median time of two steps in a row of each training on this rank."""
    found = {}
    for number, (strategy, options) in enumerate(TRAININGS.items()):
        events: list[object] = []
        chosen = {"num_epochs": 1, "num_warmup_steps": 1, "batch_size": 16} | options
        loop.run(
            RunSpec(run_id=f"run-{number}", strategy=strategy, source=CELL, link=link, **chosen),
            state=state,
            folder=folder,
            publish=events.append,
            namespace={},
            should_stop=lambda: False,
        )
        ends = [event.seconds for event in events if isinstance(event, StepEvent)][1:]
        found[strategy] = statistics.median(
            after - before for before, after in zip(ends, ends[2:], strict=False)
        )
    return found


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.TCPStore(sys.argv[3], 29500, 2, is_master=rank == 0)  # rank 0's address
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    state = make_state(rank, 2)
    own = folder / str(rank)  # as on a host of its own: nothing goes through shared memory
    own.mkdir()
    print(json.dumps(step_seconds(state, own)))
    sys.stdout.flush()
    os._exit(0)  # with gloo, torch sometimes aborts a process at its normal end


if __name__ == "__main__":
    main()
