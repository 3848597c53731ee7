"""Warm-up, learning-rate scaling and clipping, whatever the strategy (ranks).

They are hooks of the optimizer itself, so they work in a worker and in a server alike.

    lr at update t  =  lr * s(N) * min(1, (t + 1) / T)         s: N or sqrt(N), with N workers
    g               <-  g * min(1, clip / |g|)                 |g|: norm of all gradients together

References: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling, warm-up);
Krizhevsky, "One weird trick", 2014 (square root); Pascanu et al., ICML 2013 (clipping).

Loading a state restores momenta and the number of updates, but keeps this run's learning rate.
"""

import math

from torch import nn
from torch.optim import Optimizer

from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.tasks.base import OptimizerFactory
from ddpnb.rank.tasks.batches import BatchSchedule

_COUNT = "num_updates"
"""The key in a parameter group that counts updates during warm-up: a part of the saved state."""


def notes(spec: RunSpec, plan: Plan, schedule: BatchSchedule) -> tuple[str, ...]:
    """Return the notes that stand beside the results if the warm-up is too short or too long."""
    if spec.num_lr_warmup_epochs == 0:
        return ()
    option = f"--lr-warmup {spec.num_lr_warmup_epochs:g}"
    num_updates = _num_warmup_updates(spec, plan, schedule)
    if num_updates <= 1:
        return (f"{option} has no effect: that is the time of one update, or less.",)
    if num_updates > schedule.num_steps * plan.updates_per_batch:
        return (f"The full learning rate is never reached: {option} is longer than the run.",)
    return ()


def with_hooks(
    optimizer: OptimizerFactory, spec: RunSpec, plan: Plan, schedule: BatchSchedule
) -> OptimizerFactory:
    """Return a factory of optimizers that warm up, scale and clip as the spec says."""
    scale = {"none": 1.0, "linear": plan.num_workers, "sqrt": math.sqrt(plan.num_workers)}
    num_updates = _num_warmup_updates(spec, plan, schedule)
    max_norm = math.inf if spec.clip is None else spec.clip

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made = optimizer(parameters)
        for group in made.param_groups:
            group["lr"] *= scale[spec.lr_scaling]
        full = [group["lr"] for group in made.param_groups]

        def restore(loaded: Optimizer) -> None:
            """Forget a rate from mid-warm-up, or of another number of workers."""
            for group, rate in zip(loaded.param_groups, full, strict=True):
                group["lr"] = rate

        def warm_up(stepping: Optimizer, *_: object) -> None:
            for group, rate in zip(stepping.param_groups, full, strict=True):
                group[_COUNT] = group.get(_COUNT, 0) + 1
                group["lr"] = rate * min(1.0, group[_COUNT] / num_updates)

        def clip(stepping: Optimizer, *_: object) -> None:
            every = [each for group in stepping.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(every, max_norm)

        made.register_load_state_dict_post_hook(restore)
        if num_updates > 0:
            made.register_step_pre_hook(warm_up)
        if spec.clip is not None:
            made.register_step_pre_hook(clip)
        return made

    return make


def _num_warmup_updates(spec: RunSpec, plan: Plan, schedule: BatchSchedule) -> int:
    """Return how many updates the warm-up takes; the last of them is made at the full rate."""
    updates_per_epoch = schedule.steps_per_epoch * plan.updates_per_batch
    return round(spec.num_lr_warmup_epochs * updates_per_epoch)
