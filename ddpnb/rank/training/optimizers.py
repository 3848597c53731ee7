"""The optimizer of a run: the cell's or SGD, with its schedule, scaling and clipping (ranks)."""

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.tasks.base import ModelFactory
from ddpnb.rank.tasks.batches import BatchSchedule

_MAX_TRIED = 20_000
"""Steps of a scheduler that are tried before anything trains."""


@final
class Optimizers:
    """Makes optimizers that warm up, scale and clip, whatever the strategy.

        lr at update t  =  lr * s(N) * min(1, (t + 1) / T)     s: N or sqrt(N), with N workers
        g               <-  g * min(1, clip / |g|)             |g|: norm of all gradients together

    The rate is scaled where the global batch grows with the workers (``--batch-per-worker``) alone.
    They do so in their own hooks, and so in a worker and in a server alike.  A scheduler of the
    cell's own replaces warm-up and scaling; its rate depends on the number of updates alone.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling, warm-up);
    Krizhevsky, "One weird trick", 2014 (square root); Pascanu et al., ICML 2013 (clipping).

    Args:
        function: the cell's ``optimizer``; None: SGD.
        spec: the options.
        plan: of the strategy.
        schedule: of the run.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        spec: RunSpec,
        plan: Plan,
        schedule: BatchSchedule,
    ) -> None:
        self._function = function
        self._spec = spec
        self.num_updates = max(1, round(schedule.num_steps * plan.updates_per_batch))
        """In the whole run."""
        self._num_per_epoch = schedule.steps_per_epoch * plan.updates_per_batch
        self._num_warm_up = round(spec.num_lr_warmup_epochs * self._num_per_epoch)
        """The last of them is made at the full rate."""
        scales = {"none": 1.0, "linear": plan.num_workers, "sqrt": math.sqrt(plan.num_workers)}
        self._scale = scales[spec.lr_scaling]

    def make(
        self,
        parameters: list[nn.Parameter],
        model: nn.Module,
        make_model: ModelFactory,
        *,
        is_tried: bool = False,
    ) -> Optimizer:
        """Return an optimizer of some parameters.

        Args:
            parameters: those to train; on a server copies of the model's own.
            model: what they belong to, or are copies of.
            make_model: makes another such model.
            is_tried: whether a scheduler of the cell's own makes all its steps, to see if it can.

        Raises:
            UserError: the cell's function returns something wrong.
        """
        scheduled = self._own(parameters, model, make_model)
        made, scheduler = scheduled.optimizer, scheduled.scheduler
        if scheduler is not None:
            self._refuse_other_rates()
            if is_tried:
                self._try(scheduled)
        for group in made.param_groups:
            group["lr"] *= self._scale
        if self._num_warm_up > 0:
            rates = LambdaLR(made, lambda done: min(1.0, (done + 1) / self._num_warm_up))
            _advance(Scheduled(made, rates), self.num_updates)
        elif scheduler is not None:
            _advance(scheduled, self.num_updates)

        def clip(stepping: Optimizer, *_: object) -> None:
            every = [each for group in stepping.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(every, self._spec.clip or math.inf)

        if self._spec.clip is not None:
            made.register_step_pre_hook(clip)
        return made

    def notes(self) -> tuple[str, ...]:
        """Return the notes that stand beside the results if the warm-up is too short or long."""
        option = f"--lr-warmup {self._spec.num_lr_warmup_epochs:g}"
        if self._spec.num_lr_warmup_epochs > 0 and self._num_warm_up <= 1:
            return (f"{option} has no effect: that is the time of one update, or less.",)
        if self._num_warm_up > self.num_updates:
            return (f"The full learning rate is never reached: {option} is longer than the run.",)
        return ()

    def _own(
        self, parameters: list[nn.Parameter], model: nn.Module, make_model: ModelFactory
    ) -> "Scheduled":
        """Call the cell's function: ``optimizer(params)`` or ``optimizer(model)``.

        It gets ``num_steps`` too where it takes an argument of that name.
        """
        function, spec = self._function, self._spec
        if function is None:
            return Scheduled(SGD(parameters, lr=spec.learning_rate, momentum=spec.used_momentum))
        names = _argument_names(function)
        takes_model, counts = names[:1] == ["model"], "num_steps" in names
        given = _model_of(parameters, model, make_model) if takes_model else parameters
        made = function(given, **({"num_steps": self.num_updates} if counts else {}))
        call = f"optimizer({'model' if takes_model else 'params'}{', num_steps' if counts else ''})"
        return _scheduled(made, call, max(1, round(self._num_per_epoch)))

    def _refuse_other_rates(self) -> None:
        given = {
            "--lr-warmup": self._spec.num_lr_warmup_epochs > 0,
            "--lr-scaling": self._spec.lr_scaling != "none",
        }
        for option in (option for option, is_given in given.items() if is_given):
            raise UserError(
                f"The scheduler that the cell's optimizer returns sets the learning rate: leave "
                f"{option} out, or the scheduler."
            )

    def _try(self, scheduled: "Scheduled") -> None:
        """Make all steps of a scheduler, with a throwaway optimizer."""
        num_steps = min(self.num_updates // scheduled.every, _MAX_TRIED)
        assert scheduled.scheduler is not None, "there is one"
        try:
            with warnings.catch_warnings(action="ignore"):  # that no update is made between them
                for _ in range(num_steps):
                    scheduled.scheduler.step()
        except Exception as error:
            raise UserError(
                f"The scheduler cannot make the {num_steps} steps of this run "
                f"({summary_of(error)}): let optimizer take num_steps as well, the number of its "
                "updates."
            ) from error


class Scheduled(NamedTuple):
    """An optimizer, and what sets its learning rate."""

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    every: int = 1
    """Updates from one step of the scheduler to the next."""


def _argument_names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # a function written in C has no signature
        return []


def _scheduled(made: Any, call: str, num_per_epoch: int) -> Scheduled:
    """Return what ``optimizer`` may return, as Lightning's ``configure_optimizers`` also may."""
    scheduler: Any = None
    every = 1
    if isinstance(made, Mapping):
        made, scheduler = made.get("optimizer"), made.get("lr_scheduler")
        options = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        in_epochs = options.get("interval", "epoch") == "epoch"
        every = int(options.get("frequency", 1)) * (num_per_epoch if in_epochs else 1)
        scheduler = options.get("scheduler")
    elif isinstance(made, tuple | list) and len(made) == 2:
        made, scheduler = map(_only, made)
    made = _only(made)
    if not isinstance(made, Optimizer):
        raise UserError(
            f"{call} returned {kind_of(made)}; return one torch.optim.Optimizer, alone or with a "
            "scheduler: several of them are a class of your own, see docs/your-code.md."
        )
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler | None):
        raise UserError(
            f"{call} returned {kind_of(scheduler)} as the scheduler; return one of "
            "torch.optim.lr_scheduler that counts steps, and wants no metric."
        )
    return Scheduled(made, scheduler, max(1, every))


def _only(made: Any) -> Any:
    """Return what a list or tuple of one holds."""
    return made[0] if isinstance(made, tuple | list) and len(made) == 1 else made


def _advance(scheduled: Scheduled, num_updates: int) -> None:
    """Advance the scheduler lazily, before the next step.

    Then the rate of the last update has been restored, which some strategies scale for each.
    """
    made, scheduler = scheduled.optimizer, scheduled.scheduler
    assert scheduler is not None, "there is one"
    num_made = num_steps = 0
    is_stepping = False  # torch calls hooks again where a step calls its parent's

    def advance(stepping: Optimizer, *_: object) -> None:
        nonlocal num_made, num_steps, is_stepping
        if is_stepping:
            return
        is_stepping = True
        if num_steps < min(num_made, num_updates) // scheduled.every:
            # Torch misses the optimizer's own step where that has moved.
            is_first = num_steps == 0
            with warnings.catch_warnings(action="ignore") if is_first else contextlib.nullcontext():
                scheduler.step()
            num_steps += 1
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
