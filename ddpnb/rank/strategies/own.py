"""Train with a strategy that the user wrote in a cell (every rank).

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

``close()`` is optional. ddpnb calls it at the end. With ``averages_weights = True``, ddpnb
estimates BatchNorm's statistics again at the end. With ``synchronous = False``, ranks need not wait
for each other in each step. You can also extend ``Strategy``, for example with a copy of a built-in
strategy. ddpnb uses such a class without changes.
"""

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class UserStrategy(Strategy):
    """A wrapper around the user's object, with defaults for everything that the object lacks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def plan(self, state: RankState) -> Plan:
        """Plan to train on every rank."""
        # Ranks need not wait for each other: a stop allows a difference of one step between ranks.
        return replace(
            super().plan(state),
            synchronous=bool(getattr(self._strategy, "synchronous", True)),
            num_steps_ahead=1,
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
            f"{type(self._strategy).__name__}.step(batch) returned {kind_of(loss)}{shape}; "
            "return the mean loss over the batch as a tensor of shape ()."
        )

    def finish(self) -> nn.Module:
        """Return the model from the user's object. If that is None, return the worker's."""
        model = self._strategy.finish()
        if model is None:
            return self.worker.model
        if isinstance(model, nn.Module):
            return model
        name = type(self._strategy).__name__
        raise UserError(f"{name}.finish() returned {kind_of(model)}; return the trained model.")

    def close(self) -> None:
        """Call ``close`` of the user's object, if the object has it."""
        if callable(close := getattr(self._strategy, "close", None)):
            close()
