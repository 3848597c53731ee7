"""How does DistributedDataParallel make gradients smaller before it sends them?  (Every rank.)

With torch's own communication hooks:

none       as they are
fp16       as float16: half the bytes of float32; what is above 65504 becomes infinite
bf16       as bfloat16: half the bytes, the range of float32, 8 bits of precision
powersgd   each matrix of gradients as the product of two thin ones, of a rank that is
           given, and what that leaves out is added to the next step's (error feedback)

Reference: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

from ddpnb.errors import UserError
from ddpnb.rank.strategies.base import State
from ddpnb.rank.strategies.support.flat import num_bytes
from ddpnb.rank.strategies.support.power import PowerMemory

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A communication hook, with what it needs and what it tells."""

    hook: CommHook
    state: object
    is_plain: bool
    """Whether the hook does what DDP does without one."""
    num_bytes: Callable[[], int]
    """Of the gradients of the step just made: what they take when they are sent."""
    save: Callable[[], State] = dict
    """Returns what the hook remembers of earlier steps."""
    load: Callable[[State], None] = lambda _: None
    """Takes that back, before the first step."""


def compression(
    name: str, parameters: Sequence[nn.Parameter], device: torch.device, rank: int
) -> Compression:
    """Return the compression of a name; takes part: every rank.

    Args:
        name: one of the choices of ``ddp``'s option ``hook``.
        parameters: those that are trained.
        device: where they are.
        rank: of PowerSGD's matrices.

    Raises:
        UserError: the backend cannot send what the hook makes.
    """
    size = num_bytes(parameters)
    num_values = sum(parameter.numel() for parameter in parameters)
    if name == "powersgd":
        return _power_sgd(parameters, size, num_values, rank)
    if name == "bf16":
        _refuse_without_bf16(device)
    hook = {"none": allreduce_hook, "fp16": fp16_compress_hook, "bf16": _bf16}[name]
    sent = size if name == "none" else 2 * num_values
    return Compression(hook=hook, state=None, is_plain=name == "none", num_bytes=lambda: sent)


def _bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's hook, which DDP refuses by its name on gloo, though gloo can add bfloat16."""
    return bf16_compress_hook(state, bucket)


def _refuse_without_bf16(device: torch.device) -> None:
    try:
        dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16, device=device))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{dist.get_backend()} cannot add bfloat16 here; take ddp:hook=fp16 instead."
        ) from error


def _power_sgd(
    parameters: Sequence[nn.Parameter], size: int, num_values: int, rank: int
) -> Compression:
    memory = PowerMemory(parameters, rank)
    counted = 0

    def num_bytes_sent() -> int:
        nonlocal counted
        before, counted = counted, memory.state.total_numel_after_compression
        num_sent = counted - before  # 0 in the plain steps
        return size * num_sent // num_values if num_sent else size

    return Compression(
        hook=memory.hook,
        state=memory.state,
        is_plain=False,
        num_bytes=num_bytes_sent,
        save=memory.save,
        load=memory.load,
    )
