"""The held-out curve of a run: copies of its model, made while it trains (ranks).

A copy is one pass over the parameters.  Where each step waits for all, every rank's clock stands
still meanwhile.  Asynchronous workers train on: rank 0 makes the copy between two of its own steps,
and the pass counts as its time.  Nothing is evaluated before training has ended, so the curve costs
no strategy anything, and no worker waits for it.

What is judged is what the run would end with if it ended there: the server's parameters, the mean
of all ranks' weights where ranks average them, else rank 0's model.
"""

import math
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import State, Strategy
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.evaluation import has_batchnorm
from ddpnb.rank.training.run_metrics import RunMetrics
from ddpnb.rank.worker import Worker, state_of

MAX_BYTES = 1_000_000_000
"""The most that the copies of a rank take, in the memory of the host."""


class Snapshot(NamedTuple):
    """The model at one moment."""

    num_samples: int
    """Seen by all workers until then."""
    seconds: float
    state: dict[str, Any]


@final
class Snapshots:
    """Copies the model every few steps; all ranks have one, and call it after each step.

    The strategy has been set up with the worker.
    """

    def __init__(self, metrics: RunMetrics, strategy: Strategy, worker: Worker) -> None:
        plan, rank = metrics.context.plan, metrics.context.state.rank
        self._metrics = metrics
        self._strategy = strategy
        self._worker = worker
        self._num_steps = metrics.context.schedule.num_steps
        self._is_mean = plan.averages_weights and plan.synchronous
        self._is_kept = rank == 0 or self._is_mean
        self.kept: list[Snapshot] = []
        """Copies that wait to be judged."""
        self.is_estimated = (
            plan.averages_weights and plan.num_workers > 1 and has_batchnorm(worker.model)
        )
        """Whether BatchNorm's statistics are estimated before a model is judged."""
        self._every = self._steps_between()
        self._next = self._due_after(0) if plan.synchronous or rank == 0 else math.inf

    def after(self, shard: Shard) -> None:
        """Copy the model after the step on a shard, if that is due."""
        num_steps = shard.step + 1
        if num_steps < self._next:
            return
        self._next = self._due_after(num_steps)
        if num_steps >= self._num_steps:  # the trained model is judged anyway
            return
        context, clock = self._metrics.context, self._metrics.clock
        self._metrics.add(clock.stop())  # steps that a GPU has yet to finish
        if not context.plan.synchronous:
            self._copy(shard)
            return
        with clock.paused():
            self._copy(shard)
            if context.plan.num_steps_ahead == 0:
                context.barrier()  # until the slowest has made its copy

    def average(self) -> None:
        """Replace the copies by their means over all ranks; takes part: every rank."""
        model = self._worker.model
        places = dict(model.named_parameters(remove_duplicate=False))  # of tied ones, all copies
        for snapshot in self.kept if self._is_mean else ():
            names = [name for name in places if name in snapshot.state]
            buffer = FlatBuffer([places[name] for name in names])
            buffer.average([snapshot.state[name] for name in names])

    @torch.no_grad()
    def _copy(self, shard: Shard) -> None:
        state = self._strategy.snapshot()
        if self._is_kept:
            seconds = self._metrics.clock.seconds
            self.kept.append(Snapshot(self._num_samples(shard), seconds, _copied(state)))

    def _num_samples(self, shard: Shard) -> int:
        """Return how many samples all workers have seen, after this one's step on a shard.

        Of synchronous workers all have made the step, or are about to.  Where it is not known how
        many shards others have trained on, it is all before this one.
        """
        context, world_size = self._metrics.context, self._worker.world_size
        step, part = shard.step + 1, 0
        if not context.plan.synchronous:
            queue = self._strategy.queue
            done = shard.step * world_size + 1 if queue is None else queue.num_shards_done
            step, part = divmod(done, world_size)
        in_part = context.schedule.size(step) * part // world_size
        return context.schedule.num_samples_before(step) + in_part

    def _due_after(self, num_steps: int) -> float:
        return (num_steps // self._every + 1) * self._every if self._every else math.inf

    def _steps_between(self) -> int:
        """Return the steps from one copy to the next; 0: there is none.

        There are at most as many copies as have room in memory.
        """
        spec, schedule = self._metrics.context.spec, self._metrics.context.schedule
        if spec.is_ceiling or spec.eval_every == 0:
            return 0
        if spec.eval_every is not None:
            every = max(1, round(spec.eval_every * schedule.steps_per_epoch))
        elif spec.num_points > 1:
            every = max(1, round(self._num_steps / spec.num_points))
        else:
            return 0
        tensors = state_of(self._worker.model)  # whole on each rank, where they are sharded
        num_copies = MAX_BYTES // sum(each.numel() * each.element_size() for each in tensors)
        return max(every, math.ceil(self._num_steps / (num_copies + 1)))


def _copied(state: State) -> State:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
