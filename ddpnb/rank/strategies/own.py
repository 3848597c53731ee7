"""A strategy that the user wrote in a cell (every rank).

Any class with ``setup(worker)``, ``step(batch)`` and ``finish()`` will do:

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

``close()`` is optional, and called in the end.  With ``averages_weights = True`` BatchNorm's
statistics are estimated anew in the end; with ``synchronous = False`` ranks need not wait for each
other at each step.  A class that extends ``Strategy``, such as a copy of a built-in one, is taken
as it is.
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
    """A user's object, with defaults for what it does not define."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        # Its ranks may not wait for each other: a stop allows for one step between them.
        return replace(
            super().plan(state),
            synchronous=bool(getattr(self._strategy, "synchronous", True)),
            num_steps_ahead=1,
            averages_weights=bool(getattr(self._strategy, "averages_weights", False)),
        )

    def setup(self, worker: Worker) -> None:
        """Hand the worker over."""
        self.worker = worker
        self._strategy.setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Have the user's object train on a batch; it returns the loss."""
        loss = self._strategy.step(batch)
        if isinstance(loss, float):
            return torch.tensor(loss, device=self.worker.device)
        if isinstance(loss, Tensor) and loss.ndim == 0:
            return loss.detach()
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(
            f"{type(self._strategy).__name__}.step(batch) returned {kind_of(loss)}{shape}; "
            "return the mean loss over the batch, a tensor of shape ()."
        )

    def finish(self) -> nn.Module:
        """Return the model that the user's object returns; the worker's where that is None."""
        model = self._strategy.finish()
        if model is None:
            return self.worker.model
        if isinstance(model, nn.Module):
            return model
        name = type(self._strategy).__name__
        raise UserError(f"{name}.finish() returned {kind_of(model)}; return the trained model.")

    def close(self) -> None:
        """Close the user's object, if it has ``close``."""
        if callable(close := getattr(self._strategy, "close", None)):
            close()
