"""How is an optimizer's step made without what torch wraps around it?  (Every rank.)

Torch wraps every step twice: in a range for its profiler with two lists of hooks, and in a
switch of the gradient mode that also speaks to its compiler.  For a thousand floats the
two take two thirds of a step of 29 microseconds.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

# By their code torch's own wrappers are told from what somebody else has wrapped around a step.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_SWITCHED = _use_grad_for_differentiable(lambda: None).__code__


def make_step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step; whole, where a hook hangs on it or somebody but torch has wrapped it."""
    step: Any = type(optimizer).step
    if not _is(step, _HOOKED) or "step" in vars(optimizer) or _has_hooks(optimizer):
        optimizer.step()
        return
    inner = step.__wrapped__
    if not _is(inner, _SWITCHED) or optimizer.defaults["differentiable"]:
        inner(optimizer)
        return
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        inner.__wrapped__(optimizer)
    finally:
        torch._C._set_grad_enabled(was_enabled)


@final
class ScaledStep:
    """Makes an optimizer's steps, each at its own share of the learning rate.

    What the optimizer does besides following the gradient, weight decay or a division by
    its size, is scaled with it; a gradient that is scaled would leave that as it is.

    Args:
        optimizer: whose steps; made, with all hooks that it is to have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._share = 1.0
        self._rates: list[Any] = []
        self._is_hooked = _has_hooks(optimizer)
        if self._is_hooked:  # a hook may set the rate: this one comes after it
            optimizer.register_step_pre_hook(self._scale)
            optimizer.register_step_post_hook(self._unscale)

    def __call__(self, share: float = 1.0) -> None:
        """Make a step at ``share`` times the learning rate."""
        if self._is_hooked:
            self._share = share
        elif share != self._share:  # hardly ever: then the rate stays scaled
            self.restore()
            self._share = share
            self._scale()
        make_step(self._optimizer)

    def restore(self) -> None:
        """Leave the optimizer at its whole rate, to be saved."""
        if not self._is_hooked and self._share != 1.0:
            self._share = 1.0
            self._unscale()

    def _scale(self, *_: object) -> None:
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * self._share

    def _unscale(self, *_: object) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def _is(function: Callable[..., object], code: object) -> bool:
    return getattr(function, "__code__", None) is code


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
