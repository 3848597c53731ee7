"""How do ranks train that each keep a part of everything only?  (Every rank.)

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Of each parameter a rank keeps one N-th of the rows, with
their gradient and their optimizer's state: stage 3 of ZeRO.  A layer's parameters are
gathered before it is used and let go of afterwards.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
PVLDB 16(12), 2023; code: ``torch.distributed.fsdp.fully_shard`` (FSDP2).

A layer is each module of a ``Sequential`` or ``ModuleList``, wherever the model holds one, and
of one inside another.  What is in none is gathered at once, with the model; so is a layer that
is registered twice or has a parameter that another part of the model uses, too.

Messages per step: one all-gather of each layer's parameters before its forward pass and,
with ``reshard``, one more before its backward pass; for each part that the batch is cut
into.  One reduce-scatter of each layer's gradients.
Bytes sent per step and rank, in A parts: (N - 1) * (P * 2 A + G), or without ``reshard``
(N - 1) * (P * A + G), with P the bytes of a rank's part of the parameters and G those of its
part of the gradients: P, but for frozen parameters, which have none.  Rows are filled up to a
multiple of N: P is about S / N.  Counted are the messages that torch really sends: a frozen
layer may be gathered once only, one that a step does not use never.  Gloo makes each
reduce-scatter of an all-reduce; what that sends more is not counted, nor the norm for clipping.
"""

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddpnb.compat.probe import sentence
from ddpnb.errors import UserError
from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import (
    Batch,
    Memory,
    Plan,
    Replica,
    State,
    StepReport,
    Strategy,
)
from ddpnb.rank.strategies.support.flat import memory_of
from ddpnb.rank.strategies.support.gathers import NCCL_NOTE, Messages
from ddpnb.rank.strategies.support.layers import layers_of
from ddpnb.wire import RankState


@final
class Fsdp(Strategy):
    """Torch's ``fully_shard`` over the default process group.

    Args:
        reshard: whether a layer is let go of between its forward and its backward pass.
    """

    def __init__(self, *, reshard: bool = True) -> None:
        self._reshard = reshard

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def check(self, replica: Replica) -> None:
        """Refuse parameters without rows to cut between, and layers of several types."""
        module = importlib.import_module("torch.distributed.fsdp").FSDPModule
        if not hasattr(module, "set_custom_all_gather"):
            told = "fsdp needs a newer version; leave fsdp out of the comparison."
            raise UserError(sentence("torch", told))
        for name, parameter in replica.model.named_parameters():
            if parameter.ndim == 0 or parameter.numel() == 0:
                raise UserError(
                    f"fsdp cuts parameters between their rows, and {name}, of shape "
                    f"{tuple(parameter.shape)}, has none: give it one, e.g. the shape (1,), "
                    "or leave fsdp out of the comparison."
                )
        if any(len(types) > 1 for types in _types_of_layers(replica.model)):
            raise UserError(
                "fsdp wants one floating-point type in what it gathers at once: give the model "
                "one, or each type a layer of its own in a Sequential, or leave fsdp out."
            )

    def setup(self, replica: Replica) -> None:
        """Cut the parameters up; takes part: every rank."""
        self._messages = Messages(replica.timer, replica.device)
        self._replica = replace(replica, timer=self._messages.timer)
        self._skeleton = _without_parameters(replica.model)
        assert dist.group.WORLD is not None, "this rank is in a group"
        # Imported when asked for: it takes a second, and every rank would pay it at start.
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = DeviceMesh.from_group(dist.group.WORLD, replica.device.type)
        for layer in (*layers_of(replica.model), replica.model):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=self._reshard)
            # Gloo adds on the GPU, but takes no mean there.
            layer.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
            self._messages.carry(layer)
        self._optimizer = replica.optimizer(replica.parameters)

    def shares(self) -> Iterator[Share]:
        """This rank's part of every global batch."""
        return self._replica.shares()

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        replica = self._replica
        # forward, backward: each layer's parameters come, its gradients go.  They are divided
        # by the number of ranks; the weight makes that a mean over samples.
        smallest_share = batch.num_global // replica.world_size
        num_parts = min(replica.accumulate, smallest_share)  # the same on every rank
        loss = replica.compute_gradients(
            batch,
            weight=replica.world_size * batch.weight,
            unsynced=self._unsynced,
            most=num_parts,
        )
        # update: each rank its part
        replica.update(self._optimizer)
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            num_bytes_sent=self._messages.take_num_bytes(),
        )

    def notes(self) -> tuple[str, ...]:
        """Say where communication cannot be told apart."""
        is_apart = self._messages.is_exposed or self._replica.world_size == 1
        return () if is_apart else (NCCL_NOTE,)

    def memory(self) -> Memory:
        """This rank's part of both."""
        return memory_of(self._replica.model.parameters(), self._optimizer)

    def finish(self) -> nn.Module:
        """Gather all into a plain model; takes part: every rank."""
        model = self._replica.model
        pairs = zip(self._skeleton.parameters(), model.parameters(), strict=True)
        whole = {id(empty): _gathered(parameter) for empty, parameter in pairs}
        plain = copy.deepcopy(self._skeleton, whole)
        for mine, theirs in zip(plain.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
        return plain

    def save(self, replica: Replica) -> State:
        """Return the whole model, and this rank's part of the optimizer's state.

        Takes part: every rank.
        """
        whole = {name: _whole(value) for name, value in replica.model.state_dict().items()}
        return {"model": whole, "optimizers": [_parts(each) for each in replica.optimizers]}

    def load(self, replica: Replica, state: State) -> None:
        """Take this rank's part of the optimizer's state; the model was loaded before."""
        for mine, theirs in zip(replica.optimizers, state["optimizers"], strict=True):
            mine.load_state_dict(theirs)
            for parameter, held in mine.state.items():
                for name, value in held.items():
                    held[name] = _like(parameter, value)

    def close(self) -> None:
        """Nothing to let go of: the process group belongs to the rank."""

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Keep gradients here for a while, whole."""
        model: Any = self._replica.model  # an FSDPModule since setup
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def _types_of_layers(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Yield the types of the trained parameters of each layer, and of what is in none."""
    seen: set[nn.Parameter] = set()
    for layer in (*layers_of(model), model):
        held = set(layer.parameters()) - seen
        seen |= held
        yield {parameter.dtype for parameter in held if parameter.requires_grad}


def _without_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters have shapes but no values."""
    empty: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)


def _gathered(parameter: nn.Parameter) -> nn.Parameter:
    """Return the whole of a parameter that is spread over the ranks; takes part: every rank."""
    held: Any = parameter.detach()  # a DTensor since setup
    return nn.Parameter(held.full_tensor(), parameter.requires_grad)


def _whole(value: Tensor) -> Tensor:
    """Return the whole of a tensor that may be spread over the ranks; takes part: every rank."""
    held: Any = value
    whole: Tensor = held.full_tensor() if hasattr(held, "full_tensor") else held
    return whole


def _parts(optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's state with plain tensors: this rank's parts."""
    state = optimizer.state_dict()
    held = {
        number: {name: _local(value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": held}


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _like(parameter: Any, value: Any) -> Any:
    """Return a part of something as a tensor that is spread as ``parameter`` is."""
    if not isinstance(value, Tensor) or value.shape != parameter.to_local().shape:
        return value
    return type(parameter.data).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
