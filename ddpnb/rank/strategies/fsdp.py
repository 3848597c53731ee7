"""Fully sharded data parallel (FSDP): each rank stores only a part of the model (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp``. Each rank keeps one N-th of the rows of each parameter, with their
gradient and optimizer state (stage 3 of ZeRO). Ranks gather a layer's parameters before the
layer runs, and release them afterwards.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", PVLDB
16(12), 2023; code: ``torch.distributed.fsdp.fully_shard`` (FSDP2).

Each module in a ``Sequential`` or ``ModuleList`` is a layer, at any depth of the model. All other
parameters are gathered together, with the model. A layer is also gathered with the model if the
layer, or one of its parameters, occurs twice in the model.

- Messages per step: one all-gather of each layer's parameters before its forward pass, for each
  micro-batch. With ``reshard``, one more all-gather before the layer's backward pass. Finally, one
  reduce-scatter of each layer's gradients.
- Bytes sent per step and rank, with A micro-batches: (N - 1) * (P * 2 A + G). Without ``reshard``:
  (N - 1) * (P * A + G). P is the bytes of a rank's part of the parameters, about an N-th. G is the
  bytes of a rank's part of the gradients: P without the frozen parameters. Torch may gather a
  frozen layer only once, and an unused layer never. gloo's reduce-scatter is an all-reduce. The
  extra bytes of gloo and the norm for clipping are not counted.

gloo's collectives block the thread, so all their time is exposed, including waits for other ranks.
NCCL's collectives run on separate streams. NCCL's collectives count as hidden from start to end,
because torch does not report when the GPU waits for a collective.
"""

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, State, Strategy
from ddpnb.rank.worker import Batch, Worker

_NCCL_NOTE = "With NCCL, all communication counts as overlapped, even if the GPU waits for it."


@final
class Fsdp(Strategy):
    """Torch's ``fully_shard`` on the default process group.

    Args:
        reshard: True to release a layer between its forward and its backward pass.
    """

    def __init__(self, *, reshard: bool = True) -> None:
        self.reshard = reshard

    def plan(self, state: RankState) -> Plan:
        """Plan to train on every rank."""
        sees = state.backend == "gloo" or state.world_size == 1
        notes = () if sees else (_NCCL_NOTE,)
        return replace(super().plan(state), finish_is_timed=False, sees_exposed=sees, notes=notes)

    def setup(self, worker: Worker) -> None:
        """Shard the parameters, then create this rank's optimizer. Every rank takes part."""
        assert dist.group.WORLD is not None, "this rank is in a group"
        # Imported here because the import takes a second. At the top, every rank would need it.
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = DeviceMesh.from_group(dist.group.WORLD, worker.device.type)
        for layer in (*layers_of(worker.model), worker.model):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
            # gloo can sum on the GPU, but it cannot average.
            layer.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
        super().setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every rank takes part."""
        worker = self.worker
        # forward, backward; communicate: torch gathers each layer's parameters and averages its
        # gradients. Torch divides by the number of ranks. The weight makes that a sample mean.
        weight = worker.world_size * batch.weight
        loss = worker.compute_gradients(batch, weight=weight, unsynced=self._unsynced)
        # update: each rank updates its part
        worker.update(self.optimizer)
        return loss

    def finish(self) -> nn.Module:
        """Gather all parameters into a plain model. Every rank takes part."""
        plain = self.worker.make_model()
        plain.load_state_dict(self.snapshot())
        for mine, theirs in zip(plain.buffers(), self.worker.model.buffers(), strict=True):
            mine.copy_(theirs)  # not every buffer is in the state_dict
        return plain

    def snapshot(self) -> State:
        """Gather the whole model. Every rank takes part."""
        held = self.worker.model.state_dict()  # its parameters are DTensors since setup
        return {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in held.items()
        }

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Keep whole gradients on this rank, without communication, in this context."""
        model: Any = self.worker.model  # an FSDPModule since setup
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def layers_of(model: nn.Module) -> list[Any]:
    """Return the modules to gather one by one.

    Torch gathers a module's parameters when the module is called. Therefore, only modules that are
    certainly called by themselves are returned, such as the blocks of a transformer.
    """
    places = Counter(each for _, each in model.named_parameters(remove_duplicate=False))
    return [layer for layer in _listed(model) if all(places[p] == 1 for p in layer.parameters())]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters in any list, at any depth.

    A list is a ``Sequential``, or a module that cannot be called, such as a ``ModuleList`` or
    ``ModuleDict``.
    """
    for child in module.children():
        if not _is_list(module) or _is_list(child):
            yield from _listed(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward
