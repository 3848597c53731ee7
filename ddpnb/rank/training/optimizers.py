"""Makes a run's optimizer with its scheduler and gradient clipping.  Runs on the ranks."""

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.worker import Worker


def make_optimizer(
    parameters: list[nn.Parameter],
    worker: Worker,
    function: Callable[..., Any] | None,
    spec: RunSpec,
    num_updates: int,
) -> Optimizer:
    """Return an optimizer that clips gradients and advances its scheduler, with any strategy.

        g  <-  g * min(1, clip / |g|)             |g|: norm of all gradients together

    Hooks of the optimizer clip the gradients and advance the scheduler, in workers and in servers.
    The learning rate of a scheduler depends only on the number of updates.

    Reference: Pascanu et al., ICML 2013 (clipping).

    On a server, the parameters are copies of the model's parameters.  ``function`` is the cell's
    function ``optimizer``.  If ``function`` is None, the optimizer is SGD.  ``num_updates`` is the
    number of updates in the whole run.

    Raises:
        UserError: if the cell's function does not return an optimizer.
    """
    if function is None:
        made: Optimizer = SGD(parameters, lr=spec.learning_rate, momentum=spec.used_momentum)
    else:
        names = list(inspect.signature(function).parameters)
        given = _model_of(parameters, worker) if names[:1] == ["model"] else parameters
        counts = {"num_steps": num_updates} if "num_steps" in names else {}
        made, scheduler = _checked(function(given, **counts))
        if scheduler is not None:
            _advance(made, scheduler, num_updates, worker)
    if (clip := spec.clip) is not None:

        def clip_gradients(stepping: Optimizer, *_: object) -> None:
            every = [each for group in stepping.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(every, clip)

        made.register_step_pre_hook(clip_gradients)
    return made


def _checked(result: Any) -> tuple[Optimizer, LRScheduler | None]:
    """Return the optimizer and the scheduler from the result of the cell's function."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    made, scheduler = result if is_pair else (result, None)
    wants_metric = isinstance(scheduler, ReduceLROnPlateau)
    is_scheduler = isinstance(scheduler, LRScheduler | None) and not wants_metric
    if isinstance(made, Optimizer) and is_scheduler:
        return made, scheduler
    kinds = f"({kind_of(made)}, {kind_of(scheduler)})" if is_pair else kind_of(made)
    raise UserError(
        f"optimizer() returned {kinds}. Return one torch.optim.Optimizer, or (optimizer, "
        "scheduler) with a scheduler that counts steps and needs no metric. For several "
        "optimizers, write a strategy class (see docs/your-code.md)."
    )


def _advance(made: Optimizer, scheduler: LRScheduler, num_updates: int, worker: Worker) -> None:
    """Make the optimizer advance the scheduler before the next step instead of after a step.

    Strategies may scale the learning rate for one update, and restore it before the next step.
    """
    num_made = position = 0
    is_stepping = False  # torch calls hooks again if a step calls its parent class's step

    def advance(stepping: Optimizer, *_: object) -> None:
        nonlocal num_made, position, is_stepping
        if is_stepping:
            return
        is_stepping = True
        wanted, before = worker.schedule_step, position
        while position < min(num_made if wanted is None else wanted, num_updates):
            # If another optimizer or worker made the first step, torch warns that this one did not.
            is_first = position == 0
            with warnings.catch_warnings(action="ignore") if is_first else contextlib.nullcontext():
                scheduler.step()
            position += 1
        if position > before and stepping is not made:  # as in zero: its optimizer has other groups
            for group, source in zip(stepping.param_groups, made.param_groups, strict=True):
                group.update({**source, "params": group["params"]})
        num_made += 1

    def end(*_: object) -> None:
        nonlocal is_stepping
        is_stepping = False

    made.register_step_pre_hook(advance)
    made.register_step_post_hook(end)


def _model_of(parameters: list[nn.Parameter], worker: Worker) -> nn.Module:
    """Return the model if it has the given parameters; otherwise make a model that has them."""
    if all(mine is theirs for mine, theirs in zip(worker.parameters, parameters, strict=True)):
        return worker.model
    made = worker.make_model()
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    given = {id(mine): theirs for mine, theirs in zip(trained, parameters, strict=True)}
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, given.get(id(parameter), parameter))
    return made
