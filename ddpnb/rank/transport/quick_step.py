"""How is an optimizer's step made without what torch wraps around it?  (Every rank.)

Torch wraps every step in a range for its profiler and in two lists of hooks: for a thousand
floats that is 18 of 29 microseconds.
"""

import torch
from torch.optim import optimizer as torch_optimizer

_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""By this code torch's own wrapper is told from what somebody else has wrapped around a step."""


def make_step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step; whole, where a hook hangs on it or somebody but torch has wrapped it."""
    step = type(optimizer).step
    is_plain = getattr(step, "__code__", None) is _WRAPPER and "step" not in vars(optimizer)
    if is_plain and not _has_hooks(optimizer):
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
