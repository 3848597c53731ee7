"""What an optimizer does around its steps: schedule, warm-up, scaling, clipping (ranks)."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.tasks.base import ModelFactory
from ddpnb.rank.tasks.batches import BatchSchedule
from ddpnb.rank.tasks.optimizers import Scheduled, TaskOptimizer, Updates

_COUNT = "num_updates"
"""The key in a parameter group that counts updates."""
_MAX_TRIED = 20_000
"""Steps of a scheduler that are tried before anything trains."""


def warm_up_notes(spec: RunSpec, plan: Plan, schedule: BatchSchedule) -> tuple[str, ...]:
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
    optimizer: TaskOptimizer,
    spec: RunSpec,
    plan: Plan,
    schedule: BatchSchedule,
    is_tried: bool = False,
) -> Callable[[list[nn.Parameter], nn.Module, ModelFactory], Optimizer]:
    """Return a factory of optimizers that warm up, scale and clip, whatever the strategy.

    Its arguments are the parameters, the model that they belong to, or are copies of, and what
    makes another such model.

        lr at update t  =  lr * s(N) * min(1, (t + 1) / T)     s: N or sqrt(N), with N workers
        g               <-  g * min(1, clip / |g|)             |g|: norm of all gradients together

    The rate is scaled where the global batch grows with the workers (``--batch-per-worker``) alone.
    They do so in their own hooks, and so in a worker and in a server alike.  A scheduler of the
    cell's own replaces warm-up and scaling; its rate depends on the number of updates alone.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling, warm-up);
    Krizhevsky, "One weird trick", 2014 (square root); Pascanu et al., ICML 2013 (clipping).
    """
    scale = {"none": 1.0, "linear": plan.num_workers, "sqrt": math.sqrt(plan.num_workers)}
    num_updates = _num_warmup_updates(spec, plan, schedule)
    max_norm = math.inf if spec.clip is None else spec.clip

    updates = Updates(
        total=max(1, round(schedule.num_steps * plan.updates_per_batch)),
        per_epoch=max(1, round(schedule.steps_per_epoch * plan.updates_per_batch)),
    )

    def make(
        parameters: list[nn.Parameter], model: nn.Module, make_model: ModelFactory
    ) -> Optimizer:
        scheduled = optimizer(parameters, lambda: _model_of(parameters, model, make_model), updates)
        made = scheduled.optimizer
        if scheduled.scheduler is not None:
            _refuse_other_rates(spec)
            if is_tried:
                _try_scheduler(scheduled, updates)
            _schedule(scheduled, updates)
        for group in made.param_groups:
            group["lr"] *= scale[spec.lr_scaling]
        full = [group["lr"] for group in made.param_groups]

        def warm_up(stepping: Optimizer) -> None:
            for group, rate in zip(stepping.param_groups, full, strict=True):
                group[_COUNT] = group.get(_COUNT, 0) + 1
                group["lr"] = rate * min(1.0, group[_COUNT] / num_updates)

        def clip(stepping: Optimizer, *_: object) -> None:
            every = [each for group in stepping.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(every, max_norm)

        if num_updates > 0:
            _before_each_step(made, warm_up)
        if spec.clip is not None:
            made.register_step_pre_hook(clip)
        return made

    return make


def _schedule(scheduled: Scheduled, updates: Updates) -> None:
    """Advance the scheduler lazily, before the next step.

    Then the rate of the last update has been restored, which some strategies scale for each.
    """
    made, scheduler = scheduled.optimizer, scheduled.scheduler
    assert scheduler is not None, "there is one"
    num_steps = 0

    def advance(stepping: Optimizer) -> None:
        nonlocal num_steps
        count = stepping.param_groups[0].get(_COUNT, 0)
        num_due = min(count, updates.total) // scheduled.every
        if num_steps < num_due:
            with _quiet(is_first=num_steps == 0):
                # Torch misses the optimizer's own step where that has moved.
                while num_steps < num_due:
                    scheduler.step()
                    num_steps += 1
            if stepping is not made:  # as in zero, whose optimizer is made of this one
                for group, source in zip(stepping.param_groups, made.param_groups, strict=True):
                    group.update(_settings(source))
        for group in stepping.param_groups:
            group[_COUNT] = count + 1

    _before_each_step(made, advance)


def _before_each_step(made: Optimizer, hook: Callable[[Optimizer], None]) -> None:
    """Call a hook once before each step; torch calls it again where a step calls its parent's."""
    is_stepping = False

    def begin(stepping: Optimizer, *_: object) -> None:
        nonlocal is_stepping
        if not is_stepping:
            is_stepping = True
            hook(stepping)

    def end(*_: object) -> None:
        nonlocal is_stepping
        is_stepping = False

    made.register_step_pre_hook(begin)
    made.register_step_post_hook(end)


@contextlib.contextmanager
def _quiet(*, is_first: bool) -> Iterator[None]:
    if not is_first:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", _COUNT)}


def _refuse_other_rates(spec: RunSpec) -> None:
    for option, is_given in (
        ("--lr-warmup", spec.num_lr_warmup_epochs > 0),
        ("--lr-scaling", spec.lr_scaling != "none"),
    ):
        if is_given:
            raise UserError(
                f"The scheduler that the cell's optimizer returns sets the learning rate: leave "
                f"{option} out, or the scheduler."
            )


def _try_scheduler(scheduled: Scheduled, updates: Updates) -> None:
    """Make all steps of a scheduler, with a throwaway optimizer.

    Raises:
        UserError: it cannot make as many.
    """
    scheduler, num_steps = scheduled.scheduler, min(updates.total // scheduled.every, _MAX_TRIED)
    assert scheduler is not None, "there is one"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no update is made between them
            for _ in range(num_steps):
                scheduler.step()
    except Exception as error:
        raise UserError(
            f"The scheduler cannot make the {num_steps} steps of this run ({summary_of(error)}): "
            "let optimizer take num_steps as well, the number of its updates."
        ) from error


def _model_of(
    parameters: list[nn.Parameter], model: nn.Module, make_model: ModelFactory
) -> nn.Module:
    """Return a model of these parameters: the model itself, or another one that is given them."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(mine is theirs for mine, theirs in zip(own, parameters, strict=True)):
        return model
    made = make_model()
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    given = {id(mine): theirs for mine, theirs in zip(trained, parameters, strict=True)}
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, given.get(id(parameter), parameter))
    return made


def _num_warmup_updates(spec: RunSpec, plan: Plan, schedule: BatchSchedule) -> int:
    """Return how many updates the warm-up takes; the last of them is made at the full rate."""
    updates_per_epoch = schedule.steps_per_epoch * plan.updates_per_batch
    return round(spec.num_lr_warmup_epochs * updates_per_epoch)
