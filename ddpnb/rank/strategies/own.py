"""Train with a strategy that the user wrote in a cell.  Every rank takes part.

Define a class with ``setup(worker)``, ``step(batch)`` and ``finish()``:

    class Averaging:
        def setup(self, worker):
            self.worker = worker
            self.optimizer = worker.optimizer(worker.parameters)

        def step(self, batch):
            loss = self.worker.compute_gradients(batch, weight=batch.weight)
            for parameter in self.worker.parameters:
                torch.distributed.all_reduce(parameter.grad)
            self.worker.update(self.optimizer)
            return loss

        def finish(self):
            return self.worker.model

The method ``close()`` is optional. ddpnb calls ``close()`` at the end. If the class sets
``averages_weights = True``, ddpnb estimates BatchNorm's statistics again at the end. If the class
sets ``synchronous = False``, ranks need not wait for each other in each step. The class may inherit
from ``Strategy``, for example if you change a copy of a built-in strategy.
"""

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.compat.torch_internals import remove_gradient_hooks
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class UserStrategy(Strategy):
    """A wrapper around the user's strategy, with defaults for all optional attributes."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank."""
        return replace(
            super().plan(state),
            synchronous=bool(getattr(self._strategy, "synchronous", True)),
            in_lockstep=False,
            averages_weights=bool(getattr(self._strategy, "averages_weights", False)),
        )

    def setup(self, worker: Worker) -> None:
        """Pass the worker to the user's object."""
        self.worker = worker
        self._strategy.setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Call ``step`` of the user's object, and check the loss that it returns."""
        loss = self._strategy.step(batch)
        if isinstance(loss, float):
            return torch.tensor(loss, device=self.worker.device)
        if isinstance(loss, Tensor) and loss.ndim == 0:
            return loss.detach()
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(
            f"{type(self._strategy).__name__}.step(batch) returned {kind_of(loss)}{shape}. "
            "Return the mean loss over the batch as a tensor of shape ()."
        )

    def finish(self) -> nn.Module:
        """Return the model from the user's ``finish``, or the worker's model if this is None."""
        model = self._strategy.finish()
        if model is None:
            return self.worker.model
        if isinstance(model, nn.Module):
            return model
        name = type(self._strategy).__name__
        raise UserError(f"{name}.finish() returned {kind_of(model)}. Return the trained model.")

    def close(self) -> None:
        """Call the user's ``close`` method if it exists, and remove the class's hooks."""
        if callable(close := getattr(self._strategy, "close", None)):
            close()
        if hasattr(self, "worker"):
            remove_gradient_hooks(self.worker.model)
