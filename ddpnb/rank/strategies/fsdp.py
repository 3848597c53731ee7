"""Fully sharded data parallel: each rank keeps a part of everything (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Of each parameter a rank keeps one N-th of the rows, with
their gradient and their optimizer's state: stage 3 of ZeRO.  A layer's parameters are
gathered before it is used and released afterwards.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
PVLDB 16(12), 2023; code: ``torch.distributed.fsdp.fully_shard`` (FSDP2).

A layer is each module in a ``Sequential`` or ``ModuleList``, at any depth of the model.
Parameters in no layer are gathered at once, with the model.  So are those of a layer that is
registered twice, or that shares a parameter with another part of the model.

Messages per step: one all-gather of each layer's parameters before its forward pass and, with
``reshard``, one more before its backward pass, for each part that the batch is split into; one
reduce-scatter of each layer's gradients.
Bytes sent per step and rank, in A parts: (N - 1) * (P * 2 A + G), or without ``reshard``
(N - 1) * (P * A + G), with P the bytes of a rank's part of the parameters, about an N-th, and G
those of its part of the gradients: P less the frozen parameters.  The messages that torch really
sends are counted: it may gather a frozen layer only once, and an unused one never.  Gloo's
reduce-scatter is an all-reduce; its extra bytes are not counted, nor is the norm for clipping.

Gloo's collectives block the thread: all their time, waits for other ranks included, is exposed.
NCCL's run on streams of their own and count as hidden from start to end, even while the GPU
waits for them, because torch does not report when it does.
"""

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddpnb.compat.probe import sentence
from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies.base import State, SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Moment, Replica, StepReport, Timer

_NCCL_NOTE = (
    "fsdp over NCCL: all communication counts as overlapped, even where the GPU waits for it."
)


def is_supported() -> bool:
    """Return whether this torch lets the collectives of ``fully_shard`` be replaced."""
    module = importlib.import_module("torch.distributed.fsdp").FSDPModule
    return hasattr(module, "set_custom_all_gather") and hasattr(dist, "all_gather_single")


@final
class Fsdp(SynchronousStrategy):
    """Torch's ``fully_shard`` over the default process group.

    Args:
        reshard: whether a layer is released between its forward and its backward pass.
    """

    ends_in_finish = False

    def __init__(self, *, reshard: bool = True) -> None:
        self._reshard = reshard

    def check(self, replica: Replica) -> None:
        """Refuse parameters without rows to shard, layers of several types, and unused layers."""
        if not is_supported():
            advice = "fsdp needs a newer version; leave fsdp out of the comparison."
            raise UserError(sentence("torch", advice))
        for name, parameter in replica.model.named_parameters():
            if parameter.ndim == 0 or parameter.numel() == 0:
                raise UserError(
                    f"fsdp cuts parameters between their rows, and {name}, of shape "
                    f"{tuple(parameter.shape)}, has none: give it one, e.g. the shape (1,), "
                    "or leave fsdp out of the comparison."
                )
        _check_used(replica.model)
        if any(len(types) > 1 for types in _types_of_layers(replica.model)):
            raise UserError(
                "fsdp wants one floating-point type in what it gathers at once: give the model "
                "one, or each type a layer of its own in a Sequential, or leave fsdp out."
            )

    def setup(self, replica: Replica) -> None:
        """Shard the parameters, then make this rank's optimizer; takes part: every rank."""
        self._messages = _Messages(replica.timer, replica.device)
        self._skeleton = _without_parameters(replica.model)
        assert dist.group.WORLD is not None, "this rank is in a group"
        # Imported here because it takes a second, which every rank would pay at start.
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = DeviceMesh.from_group(dist.group.WORLD, replica.device.type)
        for layer in (*layers_of(replica.model), replica.model):
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=self._reshard)
            # Gloo can sum on the GPU, but not average.
            layer.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
            self._messages.observe(layer)
        super().setup(replica)

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        replica = self._replica
        # forward, backward; agree: each layer's parameters are gathered, its gradients averaged.
        # Torch divides by the number of ranks; the weight makes that a mean over samples.
        most_parts = batch.num_global // replica.world_size  # the same on every rank
        loss = replica.compute_gradients(
            replace(batch, most_parts=most_parts),
            weight=replica.world_size * batch.weight,
            unsynced=self._unsynced,
        )
        # update: each rank its part
        replica.update(self._optimizer)
        return batch.report(loss, num_bytes_sent=self._messages.take_num_bytes())

    def notes(self) -> tuple[str, ...]:
        """Report where exposed communication cannot be distinguished."""
        return () if self.sees_exposed() else (_NCCL_NOTE,)

    def sees_exposed(self) -> bool:
        """Only where gloo's collectives block the thread; one rank alone has nothing to see."""
        return self._messages.is_exposed or self._replica.world_size == 1

    def finish(self) -> nn.Module:
        """Gather all parameters into a plain model; takes part: every rank."""
        model = self._replica.model
        pairs = zip(self._skeleton.parameters(), model.parameters(), strict=True)
        whole: dict[int, object] = {
            id(empty): nn.Parameter(_whole(parameter.detach()), parameter.requires_grad)
            for empty, parameter in pairs
        }
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

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Keep whole gradients on this rank for a while."""
        model: Any = self._replica.model  # an FSDPModule since setup
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def _check_used(model: nn.Module) -> None:
    """Refuse a layer without a gradient after a step: another rank might call another one.

    Both would then gather at once, each the other's part.
    """
    held = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and id(parameter) in held:
            raise UserError(
                "fsdp gathers a layer when it is called, so all ranks must call the same ones, and "
                f"{name} had no part in a step: use every layer, or leave fsdp out."
            )


def layers_of(model: nn.Module) -> list[Any]:
    """Return the modules to gather one by one, inner modules before outer ones.

    Torch gathers a module's parameters when the module is called, so these are modules that are
    certainly called, such as the blocks of a transformer.
    """
    candidates = set(_listed(model))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    places: Counter[nn.Module] = Counter()
    holders: dict[str, nn.Module] = {}
    # A module that is registered at several places appears at each.
    for path, module in model.named_modules(remove_duplicate=False):
        places[module] += 1
        outer = holders.get(path.rpartition(".")[0], model)
        holders[path] = module if module in candidates else outer
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(holders[path])
    shared = {owner for found in owners.values() if len(set(found)) > 1 for owner in found}
    repeated = {layer for layer in candidates if places[layer] > 1}
    chosen = candidates - shared - repeated - {model}
    return [module for module in reversed(list(model.modules())) if module in chosen]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters in any list, at any depth.

    A list is a ``Sequential``, or a module that cannot be called, such as a ``ModuleList`` or
    ``ModuleDict``: each module in it is called by itself.
    """
    for child in module.children():
        if not _is_list(module) or _is_list(child):
            yield from _listed(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward


def _types_of_layers(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Yield the types of the trained parameters of each layer, then of those in no layer."""
    seen: set[nn.Parameter] = set()
    for layer in (*layers_of(model), model):
        held = set(layer.parameters()) - seen
        seen |= held
        yield {parameter.dtype for parameter in held if parameter.requires_grad}


def _without_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which parameters have shapes but no values."""
    empty: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)


def _whole(value: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; takes part: every rank."""
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
    """Return this rank's part as a tensor sharded like ``parameter``; other values as they are."""
    if not isinstance(value, Tensor) or value.shape != parameter.to_local().shape:
        return value
    return type(parameter.data).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@final
class _Messages:
    """Counts and times the all-gathers and reduce-scatters of one rank.

    Args:
        timer: gets the times.
        device: where the parameters are.
    """

    def __init__(self, timer: Timer, device: torch.device) -> None:
        self.is_exposed = dist.get_backend() == "gloo"
        self._timer = timer
        self._computing = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._num_bytes = 0

    def observe(self, layer: Any) -> None:
        """Count and time the messages of a sharded layer."""
        layer.set_custom_all_gather(_CountedCollective(self, dist.all_gather_single))
        layer.set_custom_reduce_scatter(_CountedCollective(self, dist.reduce_scatter_single))

    def take_num_bytes(self) -> int:
        """Return the bytes that this rank has sent since the last call."""
        taken, self._num_bytes = self._num_bytes, 0
        return taken

    @contextmanager
    def counted(self, part: Tensor, group: dist.ProcessGroup) -> Iterator[None]:
        """Count and time a collective that sends as much as ``part`` to each other rank."""
        self._num_bytes += (group.size() - 1) * part.numel() * part.element_size()
        if self.is_exposed:
            before = self._timer.begin("communication", at=self._moment())
            try:
                yield
            finally:
                self._timer.begin(before, at=self._moment())
        else:
            begun = self._timer.moment()  # on the collective's own stream
            yield
            self._timer.hide(begun, self._timer.moment())

    def _moment(self) -> Moment:
        """Return a moment of the computing stream: torch calls collectives on others."""
        with torch.cuda.stream(self._computing) if self._computing is not None else nullcontext():
            return self._timer.moment()


@final
class _CountedCollective:
    """A collective with the two methods that torch calls; it needs no base class."""

    def __init__(self, messages: _Messages, collective: Callable[..., dist.Work | None]) -> None:
        self._messages = messages
        self._collective = collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **more: Any
    ) -> dist.Work | None:
        """Call the collective; one tensor is the whole, the other this rank's part."""
        part = min(output_tensor, input_tensor, key=Tensor.numel)
        with self._messages.counted(part, group):
            return self._collective(output_tensor, input_tensor, group=group, **more)
