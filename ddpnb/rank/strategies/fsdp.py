"""Fully sharded data parallel: each rank keeps a part of everything (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Of each parameter a rank keeps one N-th of the rows, with
their gradient and their optimizer's state: stage 3 of ZeRO.  A layer's parameters are
gathered before it is used and released afterwards.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
PVLDB 16(12), 2023; code: ``torch.distributed.fsdp.fully_shard`` (FSDP2).

A layer is each module in a ``Sequential`` or ``ModuleList``, at any depth of the model.
Parameters in no layer are gathered at once, with the model.  So are those of a layer that has a
parameter, or all of itself, in a second place of the model.

Messages per step: one all-gather of each layer's parameters before its forward pass and, with
``reshard``, one more before its backward pass, for each part that the batch is split into; one
reduce-scatter of each layer's gradients.
Bytes sent per step and rank, in A parts: (N - 1) * (P * 2 A + G), or without ``reshard``
(N - 1) * (P * A + G), with P the bytes of a rank's part of the parameters, about an N-th, and G
those of its part of the gradients: P less the frozen parameters.  Torch may gather a frozen layer
only once, and an unused one never.  Gloo's reduce-scatter is an all-reduce; its extra bytes are not
counted, nor is the norm for clipping.

Gloo's collectives block the thread: all their time, waits for other ranks included, is exposed.
NCCL's run on streams of their own and count as hidden from start to end, even while the GPU
waits for them, because torch does not report when it does.
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

_NCCL_NOTE = "Over NCCL all communication counts as overlapped, even where the GPU waits for it."


@final
class Fsdp(Strategy):
    """Torch's ``fully_shard`` over the default process group.

    Args:
        reshard: whether a layer is released between its forward and its backward pass.
    """

    def __init__(self, *, reshard: bool = True) -> None:
        self.reshard = reshard

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        sees = state.backend == "gloo" or state.world_size == 1
        notes = () if sees else (_NCCL_NOTE,)
        return replace(super().plan(state), finish_is_timed=False, sees_exposed=sees, notes=notes)

    def setup(self, worker: Worker) -> None:
        """Shard the parameters, then make this rank's optimizer; takes part: every rank."""
        assert dist.group.WORLD is not None, "this rank is in a group"
        # Imported here because it takes a second, which every rank would pay at start.
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = DeviceMesh.from_group(dist.group.WORLD, worker.device.type)
        for layer in (*layers_of(worker.model), worker.model):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
            # Gloo can sum on the GPU, but not average.
            layer.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
        super().setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; takes part: every rank."""
        worker = self.worker
        # forward, backward; agree: each layer's parameters are gathered, its gradients averaged.
        # Torch divides by the number of ranks; the weight makes that a mean over samples.
        weight = worker.world_size * batch.weight
        loss = worker.compute_gradients(batch, weight=weight, unsynced=self._unsynced)
        # update: each rank its part
        worker.update(self.optimizer)
        return loss

    def finish(self) -> nn.Module:
        """Gather all parameters into a plain model; takes part: every rank."""
        plain = self.worker.make_model()
        plain.load_state_dict(self.snapshot())
        for mine, theirs in zip(plain.buffers(), self.worker.model.buffers(), strict=True):
            mine.copy_(theirs)  # some are in no state
        return plain

    def snapshot(self) -> State:
        """Gather the whole model; takes part: every rank."""
        held = self.worker.model.state_dict()  # its parameters are DTensors since setup
        return {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in held.items()
        }

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Keep whole gradients on this rank for a while."""
        model: Any = self.worker.model  # an FSDPModule since setup
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def layers_of(model: nn.Module) -> list[Any]:
    """Return the modules to gather one by one.

    Torch gathers a module's parameters when the module is called, so these are modules that are
    certainly called by themselves, such as the blocks of a transformer.
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
