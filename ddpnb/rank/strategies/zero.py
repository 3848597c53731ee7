"""ZeRO stage 1: each rank keeps a part of the optimizer's state.  Every rank takes part.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp``. Each rank updates a part of the parameters (a few whole tensors)
and sends this part to the other ranks. A rank stores no optimizer state for other ranks' parts.

Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020; code: ``torch.distributed.optim.ZeroRedundancyOptimizer``.

- Messages per step: the same as in ``ddp``, then one broadcast of each parameter, from the rank
  that updates the parameter.
- Bytes sent per step and rank, with N ranks: 2 (N - 1) / N * S + (N - 1) * P. S is the size of all
  gradients in bytes. P is the size of this rank's part of the parameters. The sum of P over all
  ranks is S. Bytes received per step and rank: 2 (N - 1) / N * S + S - P.
"""

import importlib
from typing import Any, final

from torch.optim import Optimizer

from ddpnb.compat.torch_internals import take_step_hooks
from ddpnb.rank.strategies.ddp import DdpStrategy
from ddpnb.rank.worker import Worker


@final
class Zero(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with torch's ``ZeroRedundancyOptimizer``."""

    def setup(self, worker: Worker) -> None:
        """Wrap the model in DDP and shard its optimizer. Every rank takes part."""
        super().setup(worker)
        self.wrap(worker)
        self.optimizer = _sharded(self.optimizer)


def _sharded(made: Optimizer) -> Any:
    """Return a sharded optimizer that updates this rank's part with ``made``.

    Every rank takes part. ``made`` keeps only this rank's parameters, so its class may have any
    constructor. The sharded optimizer takes over all hooks of ``made`` (warm-up, clipping), and the
    hooks see all parameters with averaged gradients, on every rank.
    """
    groups = [group | {"params": [*group["params"]]} for group in made.param_groups]

    def on_this_rank(part: list[dict[str, Any]], **_: Any) -> Optimizer:
        for mine, own in zip(made.param_groups, part, strict=True):
            for parameter in {*mine["params"]} - {*own["params"]}:
                made.state.pop(parameter, None)  # some optimizers create their state at once
            mine["params"][:] = own["params"]
        return made

    before, after = take_step_hooks(made)
    # Import it here, because the import takes half a second and other strategies do not need it.
    optim = importlib.import_module("torch.distributed.optim")
    whole = optim.ZeroRedundancyOptimizer(groups, on_this_rank)
    for hook in before:
        whole.register_step_pre_hook(hook)
    for hook in after:
        whole.register_step_post_hook(hook)
    return whole
