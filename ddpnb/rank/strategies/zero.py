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
import inspect
from typing import Any, final

from torch.optim import Optimizer

from ddpnb.compat.torch_internals import step_hooks
from ddpnb.rank.strategies.ddp import DdpStrategy
from ddpnb.rank.worker import Worker


@final
class Zero(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with torch's ``ZeroRedundancyOptimizer``."""

    def setup(self, worker: Worker) -> None:
        """Wrap the model in DDP and shard its optimizer. Every rank takes part."""
        super().setup(worker)
        self.wrap(worker)
        self.optimizer = whole = _sharded(self.optimizer)
        worker.optimizers[:] = [whole.optim]  # this rank's part of the state


def _sharded(sample: Optimizer) -> Any:
    """Return a sharded optimizer with the settings of ``sample``. Every rank takes part.

    The sharded optimizer gets all hooks of ``sample`` (warm-up, clipping). On every rank, the hooks
    see all parameters with averaged gradients.
    """
    # The groups contain all settings, but the constructor may require some as arguments.
    takes = inspect.signature(type(sample)).parameters
    given = {key: value for key, value in sample.defaults.items() if key in takes}
    # Import it here, because the import takes half a second and other strategies do not need it.
    optim = importlib.import_module("torch.distributed.optim")
    whole = optim.ZeroRedundancyOptimizer(sample.param_groups, type(sample), **given)
    before, after = step_hooks(sample)
    for hook in before:
        whole.register_step_pre_hook(hook)
    for hook in after:
        whole.register_step_post_hook(hook)
    return whole
