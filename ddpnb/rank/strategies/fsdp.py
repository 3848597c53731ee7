"""Fully sharded data parallel (FSDP): each rank stores only a part of the model.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp``. Each rank keeps one N-th of the rows of each parameter, with their
gradients and optimizer state (stage 3 of ZeRO). Ranks gather a layer's parameters before the layer
runs, and release them afterwards. Every rank takes part.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", PVLDB
16(12), 2023; code: ``torch.distributed.fsdp.fully_shard`` (FSDP2).

Each module in a ``Sequential`` or ``ModuleList`` is a layer, at any depth of the model. Ranks
gather all other parameters together, when the whole model is called. If a layer, or one of its
parameters, occurs twice in the model, ranks do not gather this layer separately.

- Messages per step and layer, for each micro-batch: one all-gather of the parameters before the
  forward pass and, with ``reshard``, one more before the backward pass. After the last micro-batch,
  there is one reduce-scatter of the gradients.
- Bytes sent per step and rank, for A micro-batches: (N - 1) * (P * 2 A + G), or without ``reshard``
  (N - 1) * (P * A + G). P is the size of a rank's part of the parameters, about 1 / N of all
  parameters. G is the size of a rank's part of the gradients, without frozen parameters. Torch may
  gather a frozen layer only once, and does not gather an unused layer. gloo sends extra bytes,
  because its reduce-scatter is an all-reduce. These bytes and bytes for clipping are not counted.

gloo's collectives block the thread, so all their time is exposed, including waits for other ranks.
On emulated devices, ranks gather a layer while the layer before computes, as on GPUs. NCCL's
collectives run on separate CUDA streams. ddpnb counts all of their time as hidden, because torch
does not report when the GPU waits for a collective.
"""

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, State, Strategy
from ddpnb.rank.worker import Batch, Worker, copy_buffers

_NCCL_NOTE = "With NCCL, all communication counts as overlapped, even if the GPU waits for it."


@final
class Fsdp(Strategy):
    """Torch's ``fully_shard`` on the default process group.

    Args:
        reshard: If True, release a layer's parameters between its forward and backward pass.
    """

    def __init__(self, *, reshard: bool = True) -> None:
        self.reshard = reshard

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank."""
        sees = state.backend == "gloo" or state.world_size == 1
        notes = () if sees else (_NCCL_NOTE,)
        return replace(super().plan(state), finish_is_timed=False, sees_exposed=sees, notes=notes)

    def setup(self, worker: Worker) -> None:
        """Shard the parameters, then create this rank's optimizer. Every rank takes part."""
        assert dist.group.WORLD is not None, "this rank is in a group"
        # Import it here, because the import takes a second and other strategies do not need it.
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = DeviceMesh.from_group(dist.group.WORLD, worker.device.type)
        for layer in (*gathered_layers(worker.model), worker.model):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
            # gloo can sum on the GPU, but it cannot average.
            layer.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
        for path, module in worker.model.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                if not parameter.requires_grad:
                    module.register_forward_hook(partial(self._note_thawed, name), prepend=True)
        worker.clock.gathers_ahead = True
        super().setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every rank takes part."""
        worker = self.worker
        model: Any = worker.model  # an FSDPModule since setup
        # FSDP averages over the ranks. The weight turns this mean into a mean over samples.
        weight = worker.world_size * batch.weight
        model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            model.set_requires_gradient_sync(micro_batch.is_last)
            # forward; communicate: all-gather each layer's parameters before the layer runs
            loss = worker.loss(micro_batch)
            # backward; communicate: all-gather them again, and reduce-scatter the gradients
            (weight * micro_batch.share * loss).backward()
        # update: each rank updates its part of the parameters
        self.optimizer.step()
        return worker.mean_loss

    def finish(self) -> nn.Module:
        """Gather all parameters into a plain model. Every rank takes part."""
        plain = self.worker.make_model()
        copy_buffers(self.worker.model, plain)  # not every buffer is in the state_dict
        plain.load_state_dict(self.snapshot())
        return plain

    def snapshot(self) -> State:
        """Gather the state of the whole model. Every rank takes part."""
        held = self.worker.model.state_dict()  # the parameters are DTensors since setup
        return {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in held.items()
        }

    def _note_thawed(self, name: str, module: nn.Module, *_: Any) -> None:
        """Note that the user has unfrozen a gathered parameter. Torch keeps its shard frozen."""
        if getattr(module, name.rpartition(".")[2]).requires_grad and name not in self.thawed:
            self.thawed = (*self.thawed, name)


def gathered_layers(model: nn.Module) -> list[Any]:
    """Return the layers, which are the modules that torch gathers one by one.

    Torch gathers a module's parameters when the module is called. Therefore, a layer must be a
    module that is always called as a whole, such as a block of a transformer.
    """
    places = Counter(each for _, each in model.named_parameters(remove_duplicate=False))
    return [layer for layer in _listed(model) if all(places[p] == 1 for p in layer.parameters())]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each module with parameters that is an item in a list of modules, at any depth.

    A module counts as a list if it is a ``Sequential``, or if it cannot be called (a ``ModuleList``
    or ``ModuleDict``).
    """
    for child in module.children():
        if not _is_list(module) or _is_list(child):
            yield from _listed(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _is_list(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)  # None in TorchScript
    return isinstance(module, nn.Sequential) or forward is nn.Module.forward
