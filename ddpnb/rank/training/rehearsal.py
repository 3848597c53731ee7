"""A few steps before the measured ones, which leave no trace: nothing is cold when timed (ranks).

They are made on the very replica that is measured, with its optimizer, its connections and its
shared memory: DDP forms its final buckets in its second step, and memory that is new is slow at
first.  Then all that a step changes is put back in place: parameters, buffers and other attributes
of the model, the optimizers' states, the strategy's own numbers, the server's, random numbers.

A class of the user's own may keep what cannot be found, such as a file or a connection.  It is
rehearsed on a replica and an object of its own, which are then thrown away.
"""

import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpnb.rank.random_state import random_state, set_random_state
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.replica import Replica
from ddpnb.rank.tasks.batches import every_step
from ddpnb.rank.training.context import RunContext
from ddpnb.rank.training.timing import Clock, StepTiming, clock_of


def rehearse(
    context: RunContext,
    strategy: Strategy,
    replica: Replica,
    clock: Clock,
    barrier: Callable[[], None],
) -> float:
    """Make a few steps, and put back what they have changed; takes part: every rank of the plan.

    Args:
        context: the run.
        strategy: has been set up.
        replica: what it was set up with.
        clock: the run's; it has not been started.
        barrier: returns when all ranks that take part have called it.

    Returns:
        The seconds of the quickest step; 0 if none was made.
    """
    num_steps = min(context.spec.num_warmup_steps, context.num_steps)
    if num_steps == 0 or context.rejoin_info is not None:
        return 0.0
    if not strategy.can_rewind:
        return _rehearse_apart(context, num_steps)
    barrier()  # what is kept is not what another rank's steps have changed already
    kept = Kept(replica.model.modules(), replica.optimizers, [strategy, *strategy.held()])
    numbers = random_state(context.device)
    with strategy.rehearsal():
        barrier()
        with context.step_hooks.paused():
            seconds = _make_steps(context, strategy, num_steps, clock)
        barrier()  # no rank makes another step
        kept.put_back()
    replica.model.zero_grad()
    replica.take_metrics()
    set_random_state(numbers, context.device)
    return seconds


def _rehearse_apart(context: RunContext, num_steps: int) -> float:
    """Make a few steps with a replica, an optimizer and an object that are then thrown away."""
    clock, numbers = clock_of(context.device), random_state(context.device)
    with contextlib.closing(context.strategy()) as strategy:
        strategy.setup(context.replica("r", num_steps=num_steps, timer=clock))
        seconds = _make_steps(context, strategy, num_steps, clock)
        strategy.finish()
    set_random_state(numbers, context.device)
    return seconds


def _make_steps(context: RunContext, strategy: Strategy, num_steps: int, clock: Clock) -> float:
    """Train on this rank's part of the first batches, which is not taken from any queue.

    Returns:
        The seconds of the quickest step.
    """
    is_alone = context.plan.num_ranks == 1
    part, num_parts = (0, 1) if is_alone else (context.state.rank, context.plan.num_ranks)
    timings: list[StepTiming] = []
    clock.start()
    for shard in every_step(num_steps, part=part, num_parts=num_parts):
        batch = context.batch(shard, context.fetch(shard))
        timings += clock.timing(strategy.step(batch))
    timings += clock.stop()
    return min(sum(timing.parts) - timing.parts.hidden for timing in timings)


@final
class Kept:
    """What objects hold, and how to put it back in place: where others refer to it too.

    Numbers and texts, tensors, optimizers and generators of random numbers are kept, also in dicts,
    lists and tuples.  Of any other object only the reference is.

    Args:
        modules: of the model.
        optimizers: their states.
        others: objects with attributes.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        others: Iterable[object],
    ) -> None:
        self._seen: set[int] = set()
        self._restores: list[Callable[[], object]] = []
        for each in (*modules, *optimizers, *others):
            self._keep_attributes(each)

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back what was kept."""
        for restore in self._restores:
            restore()

    def _keep_attributes(self, each: object) -> None:
        if hasattr(each, "__dict__"):
            self._keep(vars(each))
            return
        state = {name: getattr(each, name) for name in getattr(each, "__slots__", ())}
        self._remember(each, state, _reset)
        for value in state.values():
            self._keep(value)

    @torch.no_grad()
    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        match value:
            case Tensor():
                self._keep_tensor(value)
            case Optimizer():
                self._keep(vars(value))
            case dict():
                self._remember(value, dict(value), _refill)
                for each in (*value.keys(), *value.values()):
                    self._keep(each)
            case list():
                self._remember(value, list(value), _replace)
                for each in value:
                    self._keep(each)
            case np.random.RandomState():
                self._remember(value, value.get_state(), np.random.RandomState.set_state)
            case random.Random():
                self._remember(value, value.getstate(), random.Random.setstate)
            case torch.Generator():
                self._remember(value, value.get_state(), torch.Generator.set_state)
            case tuple() if type(value) is tuple:
                for each in value:
                    self._keep(each)

    def _keep_tensor(self, tensor: Tensor) -> None:
        is_expanded = tensor.layout is torch.strided and any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if not is_expanded:  # else nothing can be written into it
            self._remember(tensor, tensor.detach().clone(), _overwrite)

    def _remember(self, value: Any, state: Any, restore: Callable[[Any, Any], object]) -> None:
        self._seen.add(id(value))
        self._restores.append(lambda: restore(value, state))


def _overwrite(tensor: Tensor, state: Tensor) -> None:
    tensor.detach().copy_(state)


def _refill(value: dict[Any, Any], state: dict[Any, Any]) -> None:
    for key in value.keys() - state.keys():
        del value[key]
    value.update(state)


def _replace(value: list[Any], state: list[Any]) -> None:
    value[:] = state


def _reset(value: object, state: dict[str, Any]) -> None:
    for name, each in state.items():
        setattr(value, name, each)
