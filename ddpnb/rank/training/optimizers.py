"""The optimizer of a run: the cell's or SGD, with its scheduler and clipping (ranks)."""

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks.base import ModelFactory

_MAX_TRIED = 20_000
"""Steps of a scheduler that are tried before anything trains."""


@final
class Optimizers:
    """Makes optimizers that advance their scheduler and clip, whatever the strategy.

        g  <-  g * min(1, clip / |g|)             |g|: norm of all gradients together

    They do so in their own hooks, and so in a worker and in a server alike.  The rate that a
    scheduler sets depends on the number of updates alone.

    Reference: Pascanu et al., ICML 2013 (clipping).

    Args:
        function: the cell's ``optimizer``; None: SGD.
        spec: the options.
        num_updates: in the whole run.
    """

    def __init__(
        self, function: Callable[..., Any] | None, spec: RunSpec, num_updates: int
    ) -> None:
        self._function = function
        self._spec = spec
        self._num_updates = num_updates

    def make(
        self, parameters: list[nn.Parameter], model: nn.Module, make_model: ModelFactory
    ) -> Optimizer:
        """Return an optimizer of some parameters; on a server they are copies of the model's own.

        Raises:
            UserError: the cell's function returns something wrong.
        """
        made, scheduler = self._own(parameters, model, make_model)
        if scheduler is not None:
            _advance(made, scheduler, self._num_updates)
        if self._spec.clip is not None:
            made.register_step_pre_hook(self._clip)
        return made

    def check(
        self, parameters: list[nn.Parameter], model: nn.Module, make_model: ModelFactory
    ) -> None:
        """Make all steps of the cell's scheduler, to see whether it ends before the run."""
        _, scheduler = self._own(parameters, model, make_model)
        if scheduler is None:
            return
        try:
            with warnings.catch_warnings(action="ignore"):  # that no update is made between them
                for _ in range(min(self._num_updates, _MAX_TRIED)):
                    scheduler.step()
        except Exception as error:
            raise UserError(
                f"The scheduler cannot make the {self._num_updates} steps of this run "
                f"({summary_of(error)}): let optimizer take num_steps as well, the number of its "
                "updates."
            ) from error

    def _own(
        self, parameters: list[nn.Parameter], model: nn.Module, make_model: ModelFactory
    ) -> tuple[Optimizer, Any]:
        """Call the cell's function: ``optimizer(params)`` or ``optimizer(model)``.

        It gets ``num_steps`` too where it takes an argument of that name.

        Returns:
            The optimizer and its scheduler, which may be None.
        """
        function, spec = self._function, self._spec
        if function is None:
            return SGD(parameters, lr=spec.learning_rate, momentum=spec.used_momentum), None
        try:
            names = list(inspect.signature(function).parameters)
        except ValueError:  # a function written in C has no signature
            names = []
        takes_model, counts = names[:1] == ["model"], "num_steps" in names
        given = _model_of(parameters, model, make_model) if takes_model else parameters
        result = function(given, **({"num_steps": self._num_updates} if counts else {}))
        is_pair = isinstance(result, tuple) and len(result) == 2
        made, scheduler = result if is_pair else (result, None)
        wants_metric = isinstance(scheduler, ReduceLROnPlateau)
        is_scheduler = isinstance(scheduler, LRScheduler | None) and not wants_metric
        if isinstance(made, Optimizer) and is_scheduler:
            return made, scheduler
        kinds = f"({kind_of(made)}, {kind_of(scheduler)})" if is_pair else kind_of(made)
        raise UserError(
            f"optimizer() returned {kinds}; return one torch.optim.Optimizer, or (optimizer, "
            "scheduler), where the scheduler counts steps and wants no metric. Several "
            "optimizers are a class of your own, see docs/your-code.md."
        )

    def _clip(self, stepping: Optimizer, *_: object) -> None:
        assert self._spec.clip is not None, "the hook is there for it"
        every = [each for group in stepping.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(every, self._spec.clip)


def _advance(made: Optimizer, scheduler: LRScheduler, num_updates: int) -> None:
    """Advance the scheduler lazily, before the next step.

    Then the rate of the last update has been restored, which some strategies scale for each.
    """
    num_made = 0
    is_stepping = False  # torch calls hooks again where a step calls its parent's

    def advance(stepping: Optimizer, *_: object) -> None:
        nonlocal num_made, is_stepping
        if is_stepping:
            return
        is_stepping = True
        if 0 < num_made <= num_updates:
            # Torch misses the optimizer's own step where that has moved.
            is_first = num_made == 1
            with warnings.catch_warnings(action="ignore") if is_first else contextlib.nullcontext():
                scheduler.step()
            if stepping is not made:  # as in zero, whose optimizer is made of this one
                for group, source in zip(stepping.param_groups, made.param_groups, strict=True):
                    group.update({**source, "params": group["params"]})
        num_made += 1

    def end(*_: object) -> None:
        nonlocal is_stepping
        is_stepping = False

    made.register_step_pre_hook(advance)
    made.register_step_post_hook(end)


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
