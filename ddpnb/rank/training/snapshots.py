"""Copies a run's model during training, for the run's held-out curve.  Runs on the ranks.

ddpnb makes a copy in one pass over the parameters.  If every step waits for all ranks, the clocks
of all ranks are paused while the copy is made.  In an asynchronous run, rank 0 makes the copy
between two of its steps, and the other workers continue to train.  In this case, copying counts as
training time.  The copies are evaluated after the training, so no worker waits for an evaluation.

A copy made after a step is the model that the run would return if the run ended after this step.
If ranks average weights, a copy contains the mean of all ranks' weights.  Otherwise a copy contains
the server's parameters, or rank 0's parameters if there is no server.
"""

import copy
import math
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import State, Strategy
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.evaluation import has_batchnorm
from ddpnb.rank.training.run import Run
from ddpnb.rank.worker import Worker, state_of

MAX_BYTES = 1_000_000_000
"""Maximum size in bytes of all copies that a rank keeps in the host's memory."""


class Snapshot(NamedTuple):
    """A copy of the model, made after one of the run's steps."""

    num_samples: int
    """Number of samples that all workers had trained on when the copy was made."""
    seconds: float
    state: dict[str, Any]


@final
class Snapshots:
    """Copies the model every few steps.  Every rank calls ``make`` after the same steps.

    Call ``strategy.setup(worker)`` before you create this object.
    """

    def __init__(self, run: Run, strategy: Strategy, worker: Worker) -> None:
        plan, rank = run.plan, run.state.rank
        self._run = run
        self._strategy = strategy
        self._worker = worker
        self._num_steps = run.schedule.num_steps
        self._is_mean = plan.averages_weights and plan.synchronous
        self._is_kept = rank == 0 or self._is_mean
        self.kept: list[Snapshot] = []
        """The copies that have not been evaluated yet."""
        self.is_estimated = (
            plan.averages_weights and plan.num_workers > 1 and has_batchnorm(worker.model)
        )
        """True if BatchNorm's statistics are estimated before each evaluation."""
        self._every = self._steps_between()
        self.due_after = self._due_after(0) if plan.synchronous or rank == 0 else math.inf
        """Number of steps after which the next copy is due."""

    def make(self, shard: Shard) -> None:
        """Copy the model after the step on a shard."""
        num_steps = shard.step + 1
        self.due_after = self._due_after(num_steps)
        if num_steps >= self._num_steps:  # the trained model is evaluated anyway
            return
        run, clock = self._run, self._run.clock
        self._run.add(clock.stop())  # waits for steps that a GPU has not finished
        if not run.plan.synchronous:
            self._copy(shard)
            return
        with clock.paused():
            self._worker.switch_optimizers(training=False)
            self._copy(shard)
            self._worker.switch_optimizers(training=True)
            if run.plan.in_lockstep:
                run.barrier()  # wait until the slowest rank has made its copy

    def average(self) -> None:
        """Replace each copy by the mean of all ranks' copies.  Every rank takes part."""
        model = self._worker.model
        places = dict(model.named_parameters(remove_duplicate=False))  # all names of tied weights
        for snapshot in self.kept if self._is_mean else ():
            names = [name for name in places if name in snapshot.state]
            buffer = FlatBuffer([places[name] for name in names])
            buffer.average([snapshot.state[name] for name in names])

    @torch.no_grad()
    def _copy(self, shard: Shard) -> None:
        state = self._strategy.snapshot()
        if self._is_kept:
            seconds = self._run.clock.seconds
            self.kept.append(Snapshot(self._num_samples(shard), seconds, copied(state)))

    def _num_samples(self, shard: Shard) -> int:
        """Return the number of samples that all workers have trained on after a step on ``shard``.

        If workers are synchronous, all shards of this step count as done.  If asynchronous workers
        have no work queue, all shards up to this shard count as done.
        """
        run, world_size = self._run, self._worker.world_size
        step, part = shard.step + 1, 0
        if not run.plan.synchronous:
            queue = self._strategy.queue
            done = shard.step * world_size + 1 if queue is None else queue.num_shards_done
            step, part = divmod(done, world_size)
        in_part = run.schedule.size(step) * part // world_size
        return run.schedule.num_samples_before(step) + in_part

    def _due_after(self, num_steps: int) -> float:
        return (num_steps // self._every + 1) * self._every if self._every else math.inf

    def _steps_between(self) -> int:
        """Return the number of steps from one copy to the next; 0 if no copies are made.

        All copies together have at most ``MAX_BYTES`` bytes.
        """
        spec, schedule = self._run.spec, self._run.schedule
        if spec.is_ceiling or spec.eval_every == 0:
            return 0
        if spec.eval_every is not None:
            every = max(1, round(spec.eval_every * schedule.steps_per_epoch))
        elif spec.num_points > 1:
            every = max(1, round(self._num_steps / spec.num_points))
        else:
            return 0
        tensors = state_of(self._worker.model)  # numel counts all shards
        num_copies = MAX_BYTES // sum(each.numel() * each.element_size() for each in tensors)
        return max(every, math.ceil(self._num_steps / (num_copies + 1)))


def copied(state: State) -> State:
    """Copy a model's state to the host's memory, with the attributes that ``state_dict`` sets."""
    result = copy.copy(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            result[name] = value.detach().to("cpu", copy=True)
    return result


def load_state(model: nn.Module, state: State) -> None:
    """Load a copy of the model's state.  Steps may have added or resized buffers since the copy."""
    if new := dict(model.named_parameters()).keys() - state.keys():
        raise RuntimeError(f"a later step has added the parameter {min(new)}")
    for name, buffer in model.named_buffers():
        if name in state and state[name].shape != buffer.shape:
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, state[name].to(buffer.device, copy=True))
    model.load_state_dict(state, strict=False)
