"""The optimizer of a task, with or without a scheduler of its learning rate (ranks)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddpnb.protocol.errors import UserError, kind_of

_EXAMPLE = "return a torch.optim.Optimizer, e.g.  torch.optim.SGD(params, lr=0.05)."


class Updates(NamedTuple):
    """How many updates an optimizer makes."""

    total: int
    """In the whole run."""
    per_epoch: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An optimizer, and what sets its learning rate."""

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    every: int = 1
    """Updates from one step of the scheduler to the next."""


class TaskOptimizer(Protocol):
    """Makes the optimizer of some parameters."""

    def __call__(
        self, parameters: list[nn.Parameter], model: Callable[[], nn.Module], updates: Updates
    ) -> Scheduled:
        """Return a new one.

        Args:
            parameters: those to train; on a server not the model's own.
            model: returns a model of these parameters.
            updates: how many are to be made.
        """


def default_optimizer(learning_rate: float, momentum: float = 0.0) -> TaskOptimizer:
    """Return what makes the default optimizer: SGD."""

    def make(
        parameters: list[nn.Parameter], model: Callable[[], nn.Module], updates: Updates
    ) -> Scheduled:
        return Scheduled(torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum))

    return make


def own_optimizer(function: Callable[..., Any]) -> TaskOptimizer:
    """Return what makes the optimizer that the cell's function returns.

    It is called as ``optimizer(model)`` where its argument has that name, else as
    ``optimizer(params)``; and with ``num_steps`` where it takes an argument of that name.

    Raises:
        UserError: it takes other arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C has no signature
        signature = inspect.Signature(
            [inspect.Parameter("params", inspect.Parameter.VAR_POSITIONAL)]
        )
    takes_model = next(iter(signature.parameters), "") == "model"
    counts = "num_steps" in signature.parameters
    call = f"optimizer({'model' if takes_model else 'params'}{', num_steps' if counts else ''})"
    try:
        signature.bind(None, **({"num_steps": 1} if counts else {}))
    except TypeError:
        raise UserError(f"optimizer{signature} in the cell is called as {call}.") from None

    def make(
        parameters: list[nn.Parameter], model: Callable[[], nn.Module], updates: Updates
    ) -> Scheduled:
        given = model() if takes_model else parameters
        made = function(given, **({"num_steps": updates.total} if counts else {}))
        return _scheduled(made, call, updates)

    return make


def _scheduled(made: Any, call: str, updates: Updates) -> Scheduled:
    """Return what ``optimizer`` may return, as Lightning's ``configure_optimizers`` also may."""
    scheduler: Any = None
    if isinstance(made, Mapping):
        made, scheduler = made.get("optimizer"), made.get("lr_scheduler")
        if scheduler is not None and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler}  # there it steps once an epoch
    elif isinstance(made, tuple | list) and len(made) == 2:
        made, scheduler = map(_only, made)
    else:
        made = _only(made)
    if not isinstance(made, Optimizer):
        if isinstance(made, tuple | list):
            raise UserError(
                f"{call} returned {len(made)} optimizers; several of them are a class of your own, "
                "see docs/your-code.md."
            )
        raise UserError(f"{call} returned {kind_of(made)}; {_EXAMPLE}")
    every = 1
    if isinstance(scheduler, Mapping):
        in_epochs = scheduler.get("interval", "epoch") == "epoch"
        every = int(scheduler.get("frequency", 1)) * (updates.per_epoch if in_epochs else 1)
        scheduler = scheduler.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            f"{call} returned a ReduceLROnPlateau, which wants a metric at each step, and workers "
            "have none that is the same for all; take a scheduler that counts steps."
        )
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise UserError(
            f"{call} returned {kind_of(scheduler)} as the scheduler; return one of "
            "torch.optim.lr_scheduler, or leave it out."
        )
    return Scheduled(made, scheduler, max(1, every))


def _only(made: Any) -> Any:
    """Return what a list or tuple of one holds."""
    return made[0] if isinstance(made, tuple | list) and len(made) == 1 else made
