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
from typing import Any, final

from torch.optim import Optimizer

from ddpnb.compat.torch_internals import step_hooks
from ddpnb.rank.strategies.ddp import DdpStrategy
from ddpnb.rank.worker import Worker


@final
class Zero(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with its ``ZeroRedundancyOptimizer``."""

    def setup(self, worker: Worker) -> None:
        """Wrap the model and shard its optimizer; takes part: every rank."""
        super().setup(worker)
        self.wrap(worker)
        self.optimizer = whole = _sharded(self.optimizer)
        worker.optimizers[:] = [whole.optim]  # the one that holds this rank's part of the state


def _sharded(sample: Optimizer) -> Any:
    """Return an optimizer that has made no step, with its state sharded; takes part: every rank.

    Hooks before and after a step (warm-up, clipping) move to the whole optimizer: on every rank
    they see all parameters, with the averaged gradients.
    """
    # Each group has all of its own settings; the constructor may check them, or require them.
    takes = inspect.signature(type(sample)).parameters
    given = {key: value for key, value in sample.defaults.items() if key in takes}
    # Imported here because it takes half a second, which every rank would pay at start.
    optim = importlib.import_module("torch.distributed.optim")
    whole = optim.ZeroRedundancyOptimizer(sample.param_groups, type(sample), **given)
    before, after = step_hooks(sample)
    for hook in before:
        whole.register_step_pre_hook(hook)
    for hook in after:
        whole.register_step_post_hook(hook)
    return whole
