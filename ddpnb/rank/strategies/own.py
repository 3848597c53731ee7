"""A strategy that the user wrote in a cell (every rank).

Any class with ``setup(replica)``, ``step(batch)`` and ``finish()`` will do:

    class Averaging:
        def setup(self, replica):
            self.replica = replica
            self.optimizer = replica.optimizer(replica.parameters)

        def step(self, batch):
            loss = self.replica.compute_gradients(batch, weight=batch.weight)
            for parameter in self.replica.parameters:
                torch.distributed.all_reduce(parameter.grad)
            self.replica.update(self.optimizer)
            return loss

        def finish(self):
            return self.replica.model

Three more methods are optional: ``close()`` is called in the end, ``save()`` returns what a
checkpoint should hold besides the model and its optimizers, and ``load(state)`` restores it.
With ``averages_weights = True`` BatchNorm's statistics are estimated anew in the end.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.notation import Choice
from ddpnb.rank.strategies.base import Plan, State, SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport

_METHODS = ("setup", "step", "finish")


def own_strategy(choice: Choice, namespace: Mapping[str, object]) -> "OwnStrategy":
    """Return a strategy that runs a class in ``namespace``.

    Raises:
        UserError: there is no such class, it lacks a method, or it cannot be made.
    """
    made = namespace.get(choice.name)
    if not isinstance(made, type):
        for name, entry in STRATEGIES.items():
            if choice.name in entry.aliases:
                raise UserError(f"{choice.name} is called {name} here: write that.")
        raise UserError(
            f"There is no strategy {choice.name!r}: define a class of that name with setup, step "
            "and finish, in the comparison's cell or in a %%ddp cell before it."
        )
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise UserError(f"{choice.name} has no {missing[0]}(); a strategy needs it.")
    try:
        return OwnStrategy(choice.name, made(**choice.options))
    except TypeError as error:
        raise UserError(f"{choice.name} cannot be made: {error}.") from error


@final
class OwnStrategy(SynchronousStrategy):
    """A user's object, with defaults for what it does not define.

    Every rank trains on its part of every global batch.  A class whose ranks do not wait for
    each other at each step sets ``synchronous = False``.

    Args:
        name: of the user's class.
        strategy: the user's object.
    """

    def __init__(self, name: str, strategy: Any) -> None:
        self._name = name
        self._strategy = strategy
        self.averages_weights = bool(getattr(strategy, "averages_weights", False))

    can_rewind = False

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        synchronous = bool(getattr(self._strategy, "synchronous", True))
        # Its ranks may not wait for each other: a stop allows for one step between them.
        return replace(super().plan(state), synchronous=synchronous, num_steps_ahead=1)

    def setup(self, replica: Replica) -> None:
        """Hand the replica over."""
        self._replica = replica
        self._strategy.setup(replica)

    def step(self, batch: Batch) -> StepReport:
        """Have the user's object train on a batch; it returns the loss, or a ``StepReport``."""
        result = self._strategy.step(batch)
        if isinstance(result, StepReport):
            return result
        if isinstance(result, Tensor) and result.ndim == 0:
            return batch.report(result.detach())
        if isinstance(result, float):
            return batch.report(torch.tensor(result, device=self._replica.device))
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        raise UserError(
            f"{self._name}.step(batch) returned {kind_of(result)}{shape}; "
            "return the mean loss over the batch, a tensor of shape ()."
        )

    def memory(self) -> Memory:
        """What the user's object holds is not known."""
        return Memory()

    def finish(self) -> nn.Module:
        """Return the model that the user's object returns; the replica's where that is None."""
        model = self._strategy.finish()
        if model is None:
            return self._replica.model
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{self._name}.finish() returned {kind_of(model)}; return the trained model."
            )
        return model

    def save(self, replica: Replica) -> State:
        """Add what the user's object saves, if it has ``save``."""
        state = super().save(replica)
        if callable(save := getattr(self._strategy, "save", None)):
            state["own"] = save()
        return state

    def snapshot(self, replica: Replica) -> State:
        """Return the state of the replica's model; the user's object saves nothing for it."""
        return replica.model.state_dict()

    def load(self, replica: Replica, state: State) -> None:
        """Give the user's object what it saved."""
        super().load(replica, state)
        if "own" in state and callable(load := getattr(self._strategy, "load", None)):
            load(state["own"])

    def close(self) -> None:
        """Close the user's object, if it has ``close``."""
        if callable(close := getattr(self._strategy, "close", None)):
            close()
