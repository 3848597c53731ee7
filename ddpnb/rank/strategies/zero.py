"""ZeRO stage 1: each rank keeps a part of the optimizer's state (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Each rank makes it for its own part of the parameters, a few
whole tensors, keeps the optimizer's state of these alone, and sends them to the others.

Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020; code: ``torch.distributed.optim.ZeroRedundancyOptimizer``.

Messages per step: those of ``ddp``; then one broadcast of each parameter, from the rank that
updates it.
Bytes sent per step and rank: 2 (N - 1) / N * S + (N - 1) * P, with S the bytes of all
gradients and P those of the parameters in this rank's part; P adds up to S.  Received:
2 (N - 1) / N * S + S - P.
"""

import importlib
import inspect
from functools import partial
from typing import Any, final

import torch
from torch.optim import Optimizer

from ddpnb.compat.torch_internals import lists_step_hooks, step_hooks
from ddpnb.protocol.errors import UserError
from ddpnb.rank.comm.flat_buffers import all_reduce_bytes, num_bytes
from ddpnb.rank.strategies.base import State
from ddpnb.rank.strategies.ddp import DdpStrategy, observe
from ddpnb.rank.strategies.replica import Memory, Replica


@final
class Zero(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with its ``ZeroRedundancyOptimizer``."""

    def check(self, replica: Replica) -> None:
        """Refuse parameters of several types, and a torch that does not list step hooks."""
        if not lists_step_hooks.works:
            raise UserError(f"{lists_step_hooks.sentence}.")
        if len({parameter.dtype for parameter in replica.parameters}) > 1:
            raise UserError(
                "zero wants all parameters in one floating-point type; "
                "give the model one, or leave zero out of the comparison."
            )

    def setup(self, replica: Replica) -> None:
        """Wrap the model and shard its optimizer; takes part: every rank."""
        super().setup(replica)
        self.wrap(replica)
        self.report_overlap = observe(self._ddp, replica.timer)
        self._optimizer = self._whole = _sharded(self._optimizer)
        self._part = [p for group in self._whole.optim.param_groups for p in group["params"]]
        # After the step of its part, each rank sends it to the others.
        self._whole.optim.register_step_post_hook(lambda *_: replica.timer.begin("communication"))

    def num_bytes_sent(self) -> int:
        """Return those of reducing the gradients, and of broadcasting this rank's part."""
        num_ranks = self._replica.world_size
        reduced = all_reduce_bytes(num_bytes(self._replica.parameters), num_ranks)
        return reduced + (num_ranks - 1) * num_bytes(self._part)

    def num_bytes_received(self, num_sent: int) -> int:
        """Return those of reducing the gradients, and the other ranks' parts."""
        num_ranks, every = self._replica.world_size, num_bytes(self._replica.parameters)
        return all_reduce_bytes(every, num_ranks) + every - num_bytes(self._part)

    def memory(self) -> Memory:
        """All parameters, and this rank's part of the optimizer's state."""
        return Memory.of(self._replica.model.parameters(), self._whole.optim)

    def save(self, replica: Replica) -> State:
        """Return the model, this rank's part of the optimizer, and the settings of the whole."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._whole.param_groups
        ]
        return {
            "model": replica.model.state_dict(),
            "part": self._whole.optim.state_dict(),
            "groups": groups,
        }

    def load(self, replica: Replica, state: State) -> None:
        """Continue from there; the model was loaded before it was wrapped."""
        self._whole.optim.load_state_dict(state["part"])
        for mine, theirs in zip(self._whole.param_groups, state["groups"], strict=True):
            mine.update(theirs | {"lr": mine["lr"]})  # this run's rate, as in all strategies


def _sharded(sample: Optimizer) -> Any:
    """Return the same optimizer with its state sharded; takes part: every rank.

    Hooks before and after a step (warm-up, clipping) move to the whole optimizer: on every rank
    they see all parameters, with the averaged gradients.

    Args:
        sample: a plain optimizer of all parameters that has made no step.
    """
    constructor: Any = partial(_same_kind, sample)
    # Imported here because it takes half a second, which every rank would pay at start.
    optim = importlib.import_module("torch.distributed.optim")
    whole = optim.ZeroRedundancyOptimizer(sample.param_groups, optimizer_class=constructor)
    before, after = step_hooks(sample)
    for hook in before:
        whole.register_step_pre_hook(hook)
    for hook in after:
        whole.register_step_post_hook(hook)
    return whole


def _same_kind(sample: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the sample's class and settings for other parameters.

    Each group has all of its own settings; the constructor also gets them by name because it
    may check or require them.
    """
    takes = inspect.signature(type(sample)).parameters
    given = {key: value for key, value in sample.defaults.items() if key in takes}
    make: Any = type(sample)
    made: torch.optim.Optimizer = make(groups, **given)
    return made
