"""What this rank's replica holds: digests, read without a change (ranks).

No collective is called.  Each rank answers for itself, also where the others are gone.
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.errors import closest, kind_of, summary_of
from ddpnb.protocol.replicas import (
    CHUNK_ELEMENTS,
    DIGEST_BYTES,
    Held,
    Part,
    RankReplica,
    TensorDigest,
)
from ddpnb.rank.strategies.worker import state_of
from ddpnb.rank.tasks.batches import leaves
from ddpnb.rank.variables import held_by, kind_with_group


class Content(NamedTuple):
    """What is compared of a value."""

    parts: Mapping[Part, Mapping[str, Any]]
    """Tensors; texts for what is none; None for what each rank has a part of."""
    facts: Mapping[str, Any] = {}
    """Further fields of ``Held``."""


class CannotCompareError(Exception):
    """A value is none of those that can be compared."""


def replica(
    names: Sequence[str], namespace: dict[str, Any], *, rank: int, device: torch.device
) -> RankReplica:
    """Return the digests of what this rank holds.

    Without names of variables these are all modules and optimizers.
    """
    with torch.no_grad():
        return RankReplica(
            rank=rank,
            held={name: held_under(name, namespace) for name in names or own_names(namespace)},
            random=random_digests(device),
            num_steps=dict(steps_in(namespace)),
        )


def elements(
    name: str, part: Part, tensor: str, chunks: Sequence[int], namespace: dict[str, Any]
) -> NDArray[Any]:
    """Return the values in some chunks of a tensor, one chunk after the other."""
    with torch.no_grad():
        found = content_of(eval(name, namespace), namespace).parts[part][tensor]
        pieces = [piece for number, piece in enumerate(chunks_of(found)) if number in chunks]
        values = torch.cat([piece.cpu() for piece in pieces])
        if values.is_complex():
            return values.to(torch.complex128).numpy()
        return values.to(torch.float64 if values.is_floating_point() else torch.int64).numpy()


def own_names(namespace: Mapping[str, Any]) -> list[str]:
    """Return the variables that are modules or optimizers; none of which another is a part."""
    found: dict[int, str] = {}
    parts: set[int] = set()
    for name, value in namespace.items():
        if name.startswith("_"):
            continue
        if isinstance(value, nn.Module) and state_of(value):
            parts |= {id(each) for each in value.modules() if each is not value}
            found.setdefault(id(value), name)
        elif isinstance(value, torch.optim.Optimizer):
            found.setdefault(id(value), name)
    return [name for key, name in found.items() if key not in parts]


def held_under(name: str, namespace: dict[str, Any]) -> Held:
    """Return what an expression gives, as digests; or why it cannot be compared."""
    try:
        parts, facts = content_of(eval(name, namespace), namespace)
    except CannotCompareError as error:
        return Held(problem=str(error))
    except NameError as error:
        return Held(is_missing=True, problem=meant(error, namespace))
    except Exception as error:  # noqa: BLE001  the user's expression
        return Held(problem=f"raises {summary_of(error)}")
    return Held(
        parts={
            part: {key: digest(each) for key, each in tensors.items() if has_values(each)}
            for part, tensors in parts.items()
            if tensors
        },
        sharded={
            part: num
            for part, tensors in parts.items()
            if (num := sum(not has_values(each) for each in tensors.values()))
        },
        **facts,
    )


def meant(error: NameError, namespace: Mapping[str, Any]) -> str:
    """Return which variable was probably meant; empty if none is like it."""
    near = closest(error.name or "", [name for name in namespace if not name.startswith("_")])
    return f"did you mean {near}?" if near else ""


# -- what is compared ----------------------------------------------------------------------


def content_of(value: Any, namespace: Mapping[str, Any]) -> Content:
    """Return what is compared of a value."""
    if isinstance(value, nn.Module):
        return module_content(value, namespace)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_content(value, namespace)
    tensors = {path: leaf for path, leaf in leaves(value) if isinstance(leaf, Tensor)}
    if not tensors:
        raise CannotCompareError(
            f"is {kind_of(value)}: name a model, an optimizer, a tensor or a dict of tensors"
        )
    gradient = value.grad if isinstance(value, Tensor) and value.is_leaf else None
    gradients = {} if gradient is None else {"": gradient}
    return Content({Part.VALUES: tensors, Part.GRADIENTS: gradients})


def module_content(wrapped: nn.Module, namespace: Mapping[str, Any]) -> Content:
    """Return parameters, buffers and gradients; no ``state_dict``, which may call collectives."""
    module = inside_ddp(wrapped)
    ddp = ddp_around(wrapped, namespace)
    parameters: dict[str, Any] = dict(module.named_parameters())
    gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    if keeps_flat_shards(module):
        parameters, gradients = dict.fromkeys(parameters), dict.fromkeys(gradients)
    buffers = dict(module.named_buffers())
    parts = {Part.PARAMETERS: parameters, Part.BUFFERS: buffers, Part.GRADIENTS: gradients}
    facts: dict[str, Any] = {"is_training": module.training}
    if ddp is not None:
        older = getattr(ddp, "broadcast_buffers", True)
        facts |= {
            "is_ddp": True,
            "syncs_gradients": ddp.require_backward_grad_sync,
            "syncs_buffers": bool(getattr(ddp, "forward_sync_buffers", older)),
        }
    return Content(parts, facts)


def inside_ddp(value: nn.Module) -> nn.Module:
    """Return the module inside DDP."""
    return value.module if isinstance(value, DistributedDataParallel) else value


def ddp_around(module: nn.Module, namespace: Mapping[str, Any]) -> DistributedDataParallel | None:
    """Return the DDP that a module is, or is a part of, as far as a variable leads to it."""
    values = [module, *(each for name, each in namespace.items() if not name.startswith("_"))]
    held = (each for value in values for _, each in held_by("", value))
    found = (each for each in held if isinstance(each, DistributedDataParallel))
    return next((ddp for ddp in found if any(each is module for each in ddp.modules())), None)


def keeps_flat_shards(module: nn.Module) -> bool:
    """Return whether the first FSDP wraps a part of it: each rank then has another shard."""
    return any(kind_with_group(each) == "FullyShardedDataParallel" for each in module.modules())


def optimizer_content(optimizer: torch.optim.Optimizer, namespace: Mapping[str, Any]) -> Content:
    """Return state by parameter, and the settings of each group as texts."""
    modules = [inside_ddp(each) for each in namespace.values() if isinstance(each, nn.Module)]
    names = {id(each): name for module in modules for name, each in module.named_parameters()}
    is_zero = kind_with_group(optimizer) == "ZeroRedundancyOptimizer"
    is_sharded = is_zero or any(map(keeps_flat_shards, modules))
    owner: Any = optimizer
    held = (owner.optim if is_zero else owner).state  # ZeRO keeps its shard in another optimizer
    state: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        which = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
        for key, each in group.items():
            if key not in ("params", "param_names"):
                settings[f"{key}{which}"] = f"{each.item() if isinstance(each, Tensor) else each}"
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"parameter {index}{which}")
            for key, each in held.get(parameter, {}).items():
                if isinstance(each, Tensor | int | float):
                    state[f"{key} of {name}"] = None if is_sharded else torch.as_tensor(each)
    return Content({Part.STATE: state, Part.SETTINGS: settings})


def steps_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each optimizer's name and its number of steps, where it counts them."""
    for name, value in namespace.items():
        if isinstance(value, torch.optim.Optimizer) and not name.startswith("_"):
            counts = [int(each["step"]) for each in value.state.values() if "step" in each]
            if counts or not value.state:
                yield name, max(counts, default=0)


# -- digests -------------------------------------------------------------------------------


def has_values(tensor: Any) -> bool:
    """Return whether this rank holds all values, one after the other.

    It does not of a shard, a meta tensor, or a layout of torch's that has several tensors inside.
    """
    if tensor is None or isinstance(tensor, str):
        return tensor is not None
    if placements := getattr(tensor, "placements", ()):  # of a DTensor
        return all(each.is_replicate() for each in placements)
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided


def chunks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements in pieces."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # all of a DTensor's
    yield from local.detach().resolve_conj().resolve_neg().reshape(-1).split(CHUNK_ELEMENTS)


def digest(value: Tensor | str) -> TensorDigest:
    """Return the digest of a tensor, or of a text."""
    if isinstance(value, str):
        return TensorDigest(kind=value, digests=hashed(value.encode()))
    pieces = (piece.contiguous().cpu().view(torch.uint8) for piece in chunks_of(value))
    return TensorDigest(
        shape=tuple(value.shape),
        kind=str(value.dtype).removeprefix("torch."),
        digests=b"".join(hashed(piece.numpy()) for piece in pieces),
    )


def hashed(content: Any) -> bytes:
    """Return the digest of some bytes."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def random_digests(device: torch.device) -> dict[str, TensorDigest]:
    """Return the digest of each library's global random numbers; reading moves none of them."""
    states = {
        "torch": bytes(torch.get_rng_state().numpy()),
        "Python's random": repr(random.getstate()).encode(),
    }
    if device.type == "cuda":
        states["torch on the GPU"] = bytes(torch.cuda.get_rng_state(device).numpy())
    if "numpy.random" in sys.modules:
        kind, keys, *rest = np.random.get_state()
        states["numpy"] = repr((kind, rest)).encode() + np.asarray(keys).tobytes()
    return {name: TensorDigest(digests=hashed(state)) for name, state in states.items()}
