"""A few steps of a throwaway worker before the measured ones: nothing is cold when timed (ranks).

They load code, start threads, fill the memory allocator, and compile what the user compiles, for
every size of batch that will come.  The model, the optimizer and the strategy's object that make
them are then thrown away, and global random numbers are put back.
"""

import gc
from collections.abc import Iterator
from contextlib import closing

import torch

from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.tasks.batches import Shard, every_step
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.worker import Activations

NUM_STEPS = 3


def rehearse(context: RunContext, activations: Activations) -> None:
    """Make a few steps that leave no trace; takes part: every rank of the plan."""
    num_steps = min(NUM_STEPS, context.schedule.num_steps)
    if num_steps == 0 or context.rejoin_info is not None:
        return
    with preserve_globals(context.device), closing(context.strategy()) as strategy:
        worker = context.worker("r", num_steps=num_steps)
        worker.activations = activations
        strategy.setup(worker)
        for shard in _shards(context, num_steps):
            strategy.step(context.batch(shard, context.fetch(shard)))
        strategy.finish()
    del strategy, worker
    release_memory(context.device)


def release_memory(device: torch.device) -> None:
    """Give a GPU back what earlier models held: other ranks and runs may need it."""
    if device.type == "cuda":
        gc.collect()  # DDP and its hooks refer to each other
        torch.cuda.empty_cache()


def _shards(context: RunContext, num_steps: int) -> Iterator[Shard]:
    """Yield this rank's slice of the first batches, then one of each other size.

    Every rank of the plan makes as many steps; nothing is taken from any queue.
    """
    plan, schedule = context.plan, context.schedule
    part, num_parts = context.state.rank, plan.num_ranks
    yield from every_step(num_steps, part=part, num_parts=num_parts)
    smallest = schedule.smallest_shard(1).step
    if plan.synchronous:
        if schedule.size(smallest) != schedule.size(0):
            yield Shard(step=smallest, part=part, num_parts=num_parts)
        return
    # Workers get slices of any rank: the first is a step's largest, the last its smallest.
    slices = [
        Shard(step=step, part=each, num_parts=num_parts)
        for step in (0, smallest)
        for each in (0, num_parts - 1)
    ]
    yield from {schedule.num_in(shard): shard for shard in slices}.values()
