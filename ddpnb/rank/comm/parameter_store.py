"""The parameters of the parameter server, and the update that a gradient makes (rank 0).

There are as many copies of the parameters as workers.  Each worker trains on the copy that was
the latest when it last read.  A gradient updates the latest copy in place; where another worker
trains on that, the update is made in a copy that no worker trains on.  So no parameters change
while a gradient of them is computed.

Gradients come with weights: shares of a global batch.  An update is made with their weighted
mean, at the learning rate times the sum of their weights.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.rank.comm.flat_buffers import PackedTensors
from ddpnb.rank.tasks.base import OptimizerFactory

WHOLE_ROUND = 0
"""The period of a store that makes an update only when ``apply`` is called."""
_ROUNDING = 1e-9
"""Weights with a sum this close to 1 make up a whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAccess:
    """One read of the parameters by a worker, or the arrival of its gradient."""

    rank: int
    is_write: bool
    version: int
    """Updates that the parameters have seen, including one caused by this write."""


AccessLog = Callable[[ParameterAccess], None]
"""Called with every access, in the order in which they happen."""


def ignore_access(access: ParameterAccess) -> None:
    """Keep no log."""


class ParameterStore:
    """The parameters, their one optimizer, and how many updates they have seen.

    Not thread-safe: the server calls it under its lock.

    Args:
        initial: the first parameters, on any device.
        optimizer: makes the optimizer.
        log: called with every access.
        copies: memory for the parameters, on the CPU: one copy for each worker.
        period: gradients that make one update, or ``WHOLE_ROUND``.
        is_damped: whether each gradient is scaled by its staleness, see ``damped``.
        compensation: the lambda of delay compensation, see ``compensated``; 0: none.
    """

    def __init__(
        self,
        initial: Sequence[Tensor],
        optimizer: OptimizerFactory,
        log: AccessLog = ignore_access,
        *,
        copies: Sequence[PackedTensors],
        period: int = 1,
        is_damped: bool = False,
        compensation: float = 0.0,
    ) -> None:
        self.copies = copies
        self._latest = 0
        self._trained_on: dict[int, int] = {}
        """Number of the copy that each worker trains on, by rank."""
        for mine, theirs in zip(self.tensors, initial, strict=True):
            mine.copy_(theirs.detach())
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._make_step = ScaledStep(self._optimizer)
        self._period = period
        self._is_damped = is_damped
        self._compensation = compensation
        self._log = log
        self._version = 0
        self._version_read: dict[int, int] = {}
        self._staleness: list[int] = []
        self._weight = 0.0
        """Sum over the gradients that have come since the last update."""

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters as they are now."""
        return self.copies[self._latest].tensors

    def read(self, rank: int) -> int:
        """Give a worker the parameters as they are now.

        Returns:
            The number of the copy to train on, until ``release`` or the next ``write``.
        """
        self._trained_on[rank] = self._latest
        self._version_read[rank] = self._version
        self._note(rank, is_write=False)
        return self._latest

    def release(self, rank: int) -> None:
        """Note that a worker no longer trains on any copy; may be called twice."""
        self._trained_on.pop(rank, None)

    def write(self, rank: int, gradients: Sequence[Tensor | None], weight: float = 1.0) -> int:
        """Take a worker's gradients; make an update when there are enough.

        Args:
            rank: of the worker.
            gradients: of its mean loss, one for each parameter; None: none.
            weight: the worker's share of the global batch.

        Returns:
            Their staleness: updates since the worker's last read.  It does not grow while
            they wait for the next update, which they are part of.
        """
        trained_on = self._trained_on.pop(rank, self._latest)
        staleness = self._version - self._version_read[rank]
        if self._compensation and staleness > 0:
            old, now = self.copies[trained_on].tensors, self.tensors
            gradients = compensated(gradients, old, now, self._compensation)
        if self._is_damped:
            gradients = damped(gradients, staleness, self._usual_staleness)
        self._staleness.append(staleness)
        self._weight += weight
        if self._period == 1:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            self._gather(gradients, weight)
        if len(self._staleness) == self._period:
            self.apply()
        self._note(rank, is_write=True)
        return staleness

    def apply(self) -> None:
        """Make an update with the gradients that have come since the last one, if any."""
        if not self._staleness:
            return
        if self._latest in self._trained_on.values():
            self._move_to_unused_copy()
        weight = 1.0 if abs(self._weight - 1) < _ROUNDING else self._weight
        if self._period != 1 and weight != 1.0:  # gathered: from their weighted sum to their mean
            for gradient in (p.grad for p in self._parameters if p.grad is not None):
                gradient.div_(weight)
        self._make_step(weight)
        self._version += 1
        self._staleness.clear()
        self._weight = 0.0
        for parameter in self._parameters:
            parameter.grad = None

    def tensors_packed(self) -> Tensor:
        """Return the parameters as they are now, packed: shape (bytes,)."""
        return self.copies[self._latest].raw

    def rewind(self, initial: Tensor) -> None:
        """Begin anew, with these packed parameters; the optimizer's state is the caller's.

        Each worker trains on the copy that it has, which holds them now.
        """
        for copied in self.copies:
            copied.raw.copy_(initial)
        for parameter in self._parameters:
            parameter.grad = None
        self._version_read = dict.fromkeys(self._version_read, 0)
        self._version, self._weight = 0, 0.0
        self._staleness.clear()

    def snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return copies of the parameters and of the optimizer's state."""
        parameters = [tensor.clone() for tensor in self.tensors]
        return parameters, copy.deepcopy(self._optimizer.state_dict())

    @property
    def _usual_staleness(self) -> float:
        """The mean staleness of equally fast workers: each sees one gradient of every other."""
        return (len(self.copies) - 1) / self._period

    def _note(self, rank: int, *, is_write: bool) -> None:
        self._log(ParameterAccess(rank=rank, is_write=is_write, version=self._version))

    def _move_to_unused_copy(self) -> None:
        """Leave the latest copy to the workers that train on it."""
        previous, used = self.copies[self._latest], set(self._trained_on.values())
        # One is unused: there are as many copies as workers, and the one that writes uses none.
        self._latest = next(number for number in range(len(self.copies)) if number not in used)
        self.copies[self._latest].raw.copy_(previous.raw)
        for parameter, tensor in zip(self._parameters, self.tensors, strict=True):
            parameter.data = tensor

    @torch.no_grad()
    def _gather(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient * weight
            else:
                parameter.grad.add_(gradient, alpha=weight)


def compensated(
    gradients: Sequence[Tensor | None],
    old: Sequence[Tensor],
    now: Sequence[Tensor],
    strength: float,
) -> list[Tensor | None]:
    """Return gradients of old parameters, corrected towards those of the parameters as they are.

        g  +  lambda * g * g * (w_now - w_old)

    A Taylor expansion whose Hessian is replaced by the diagonal of g g^T: Zheng et al.,
    "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017 (DC-ASGD-c).
    """
    return [
        None if g is None else torch.addcmul(g, g * g, mine - theirs, value=strength)
        for g, mine, theirs in zip(gradients, now, old, strict=True)
    ]


def damped(gradients: Sequence[Tensor | None], staleness: int, usual: float) -> list[Tensor | None]:
    """Return gradients scaled by their staleness; at the usual one they stay as they are.

        g  *  (1 + usual) / (1 + staleness)

    Zhang et al., IJCAI 2016, divide the learning rate by the staleness: that is what the weight
    b / B does on average already.  So this is relative to the usual staleness.  It scales the
    gradient and not the learning rate: momentum would keep the rest for later steps.
    """
    factor = (1 + usual) / (1 + staleness)
    return [None if gradient is None else gradient * factor for gradient in gradients]


@final
class ScaledStep:
    """Makes an optimizer's steps, each at its own fraction of the learning rate.

    This scales the whole update, including weight decay and Adam's division by the gradient's
    size.  To scale the gradient would leave those as they are.

    Args:
        optimizer: has all other hooks already, which may set the learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._fraction = 1.0
        self._rates: list[Any] = [None] * len(optimizer.param_groups)
        self._scaled_rates: list[Any] = self._rates.copy()
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._restore)

    def __call__(self, fraction: float = 1.0) -> None:
        """Make a step at this fraction of the learning rate, which is the same afterwards."""
        self._fraction = fraction
        self._optimizer.step()

    def _scale(self, *_: object) -> None:
        for n, group in enumerate(self._optimizer.param_groups):
            if group["lr"] is not self._scaled_rates[n]:  # torch calls hooks again in super().step
                self._rates[n] = group["lr"]
                group["lr"] = self._scaled_rates[n] = group["lr"] * self._fraction

    def _restore(self, *_: object) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
