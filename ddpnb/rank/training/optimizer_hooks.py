"""How does an optimizer warm up, scale its rate and clip, whatever the strategy?  (Every rank.)

Whoever makes the step, a worker or a server, these go with it: they are hooks of the
optimizer itself.

    lr at update t  =  lr * s(N) * min(1, (t + 1) / T)         s: N or sqrt(N), with N workers
    g               <-  g * min(1, clip / |g|)                 |g|: norm of all gradients together

References: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling, warm-up);
Krizhevsky, "One weird trick", 2014 (square root); Pascanu et al., ICML 2013 (clipping).

A state that is loaded brings momenta and the count of updates; the rate is this run's own.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.tasks.base import OptimizerFactory
from ddpnb.rank.tasks.batches import BatchSchedule

Hook = Any

_COUNT = "num_updates"
"""What a parameter group calls the updates that it has seen while it warms up.

There it is saved and loaded with the optimizer's state.
"""


def notes(spec: RunSpec, plan: Plan, order: BatchSchedule) -> tuple[str, ...]:
    """Return what must stand beside the results of a run that warms up hardly, or to its end."""
    if spec.num_lr_warmup_epochs == 0:
        return ()
    told = f"--lr-warmup {spec.num_lr_warmup_epochs:g}"
    num_warmup = _num_warmup(spec, plan, order)
    if num_warmup <= 1:
        return (f"{told} has no effect: that is the time of one update, or less.",)
    if num_warmup > order.num_steps * plan.updates_per_batch:
        return (f"The full learning rate is never reached: {told} is longer than the run.",)
    return ()


def tuned(
    optimizer: OptimizerFactory, spec: RunSpec, plan: Plan, order: BatchSchedule
) -> OptimizerFactory:
    """Return the factory of optimizers that do as the spec says."""
    scale = {"none": 1.0, "linear": plan.num_workers, "sqrt": math.sqrt(plan.num_workers)}
    num_warmup = _num_warmup(spec, plan, order)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer(parameters)
        for group in made.param_groups:
            group["lr"] *= scale[spec.lr_scaling]
        full = [group["lr"] for group in made.param_groups]
        made.register_load_state_dict_post_hook(_at(full))
        if num_warmup > 0:
            made.register_step_pre_hook(_warm_up(full, num_warmup))
        if spec.clip is not None:
            made.register_step_pre_hook(_clip(spec.clip))
        return made

    return make


def _at(full: Sequence[Any]) -> Hook:
    def after_load(optimizer: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate  # not what was saved: in mid-warm-up, or with other workers

    return after_load


def _warm_up(full: Sequence[Any], num_updates: int) -> Hook:
    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group[_COUNT] = group.get(_COUNT, 0) + 1
            group["lr"] = rate * min(1.0, group[_COUNT] / num_updates)

    return before_step


def _clip(largest: float) -> Hook:
    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(held, largest)

    return before_step


def _num_warmup(spec: RunSpec, plan: Plan, order: BatchSchedule) -> int:
    """Return how many updates the warm-up takes; at the last of them the rate is whole."""
    updates_per_epoch = order.steps_per_epoch * plan.updates_per_batch
    return round(spec.num_lr_warmup_epochs * updates_per_epoch)
