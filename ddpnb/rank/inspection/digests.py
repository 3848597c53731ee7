"""Computes digests of this rank's replica without changing the replica.  Runs on the ranks.

To compute digests, a rank does not call any collective.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpnb.compat.torch_internals import num_thawed
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.inspection import (
    CHUNK_ELEMENTS,
    DIGEST_BYTES,
    Held,
    Part,
    RankReplica,
    TensorDigest,
)
from ddpnb.rank.collectives.flat import local
from ddpnb.rank.tasks.batches import leaves
from ddpnb.rank.variables import held_by, kind_with_group, value_of


@torch.no_grad()
def replica(names: Sequence[str], namespace: Mapping[str, Any], *, rank: int) -> RankReplica:
    """Return the digests of this rank's variables.  Reject a variable that has no tensors.

    If ``names`` is empty, return the digests of all modules and optimizers.
    """
    return RankReplica(
        rank=rank,
        held={name: held_under(name, namespace) for name in names or own_names(namespace)},
        num_steps=steps_in(namespace),
    )


@torch.no_grad()
def elements(
    namespace: Mapping[str, Any], name: str, part: Part, tensor: str, chunks: Sequence[int]
) -> NDArray[Any]:
    """Return the values in some chunks of a tensor, one chunk after the other."""
    found = parts_of(name, namespace)[part][tensor]
    pieces = [piece for number, piece in enumerate(chunks_of(found)) if number in chunks]
    return torch.cat(pieces).cpu().double().numpy()


def trained(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that are modules or optimizers."""
    return {
        name: value
        for name, value in namespace.items()
        if isinstance(value, nn.Module | Optimizer) and not name.startswith("_")
    }


def own_names(namespace: Mapping[str, Any]) -> list[str]:
    """Return one name for each optimizer and for each module that is not part of another module."""
    names: dict[int, str] = {}
    parts: set[int] = set()
    for name, value in trained(namespace).items():
        names.setdefault(id(value), name)
        if isinstance(value, nn.Module):
            parts |= {id(each) for each in value.modules() if each is not value}
    return [name for key, name in names.items() if key not in parts]


def steps_in(namespace: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of steps of each optimizer that counts its steps."""
    found = {}
    for name, value in trained(namespace).items():
        states = value.state.values() if isinstance(value, Optimizer) else ()
        if counts := [int(state["step"]) for state in states if "step" in state]:
            found[name] = max(counts)
    return found


def held_under(name: str, namespace: Mapping[str, Any]) -> Held:
    """Return the digests of an expression's value."""
    ddp = ddp_around(value_of(name, namespace), namespace)
    parts, sharded = {}, {}
    for part, tensors in parts_of(name, namespace).items():
        if tensors:
            parts[part] = {key: digest(each) for key, each in tensors.items() if is_whole(each)}
            sharded[part] = len(tensors) - len(parts[part])
    return Held(
        parts=parts,
        sharded=sharded,
        is_ddp=ddp is not None,
        syncs_buffers=ddp is not None and ddp.broadcast_buffers,
        num_thawed=0 if ddp is None else num_thawed(ddp),
    )


# -- the compared tensors ------------------------------------------------------------------


def parts_of(name: str, namespace: Mapping[str, Any]) -> dict[Part, dict[str, Tensor]]:
    """Return the tensors in a value.  ``state_dict`` is not called, because it may communicate."""
    value = value_of(name, namespace)
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if isinstance(value, nn.Module):
        if any(kind_with_group(each) == "FullyShardedDataParallel" for each in value.modules()):
            raise UserError(f"FullyShardedDataParallel shards {name}, so ddpnb cannot compare it.")
        parameters: dict[str, Tensor] = dict(value.named_parameters())
        return {
            Part.PARAMETERS: parameters,
            Part.BUFFERS: dict(value.named_buffers()),
            Part.GRADIENTS: {n: p.grad for n, p in parameters.items() if p.grad is not None},
        }
    if isinstance(value, Optimizer):
        return {Part.STATE: dict(optimizer_state(value, namespace))}
    tensors = {path: leaf for path, leaf in leaves(value) if isinstance(leaf, Tensor)}
    if not tensors:
        raise UserError(
            f"{name} is {kind_of(value)}, which ddpnb cannot compare. Name a model, an optimizer, "
            "a tensor or a dict of tensors."
        )
    return {Part.VALUES: tensors}


def optimizer_state(
    optimizer: Optimizer, namespace: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an optimizer's state, with names that contain the parameters' names."""
    names = {
        id(parameter): name.removeprefix("module.")  # the prefix of DDP's wrapper
        for module in trained(namespace).values()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, each in optimizer.state.get(parameter, {}).items():
            if isinstance(each, Tensor):
                yield f"{key} of {names.get(id(parameter), f'parameter {number}')}", each


def ddp_around(value: Any, namespace: Mapping[str, Any]) -> DistributedDataParallel | None:
    """Return the DDP model that is or contains ``value``, or None if there is no such model."""
    held = (each for every in (value, *namespace.values()) for _, each in held_by("", every))
    found = (each for each in held if isinstance(each, DistributedDataParallel))
    return next((ddp for ddp in found if any(each is value for each in ddp.modules())), None)


# -- digests -------------------------------------------------------------------------------


def is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor is dense and this rank holds all its values, not only a shard."""
    if placements := getattr(tensor, "placements", ()):  # only a DTensor has placements
        return all(each.is_replicate() for each in placements)
    is_made = not (tensor.is_meta or nn.parameter.is_lazy(tensor))
    return is_made and tensor.layout is torch.strided


def chunks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements in chunks of ``CHUNK_ELEMENTS`` elements."""
    whole = local(tensor).detach().resolve_conj().resolve_neg()
    yield from whole.reshape(-1).split(CHUNK_ELEMENTS)


def digest(tensor: Tensor) -> TensorDigest:
    """Return the digests of a tensor's chunks."""
    pieces = (piece.contiguous().cpu().view(torch.uint8).numpy() for piece in chunks_of(tensor))
    return TensorDigest(
        shape=tuple(tensor.shape),
        kind=str(tensor.dtype).removeprefix("torch."),
        digests=b"".join(
            hashlib.blake2b(piece.data, digest_size=DIGEST_BYTES).digest() for piece in pieces
        ),
    )
