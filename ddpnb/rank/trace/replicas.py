"""What this rank's replica holds, and which samples it gets: read without a change (ranks).

No collective is called.  Each rank answers for itself, also where the others are gone.
"""

import contextlib
import copy
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ddpnb.protocol.errors import UserError, closest, kind_of, summary_of
from ddpnb.protocol.replicas import (
    CHUNK_ELEMENTS,
    DIGEST_BYTES,
    Held,
    Indices,
    Part,
    RankReplica,
    RankSamples,
    SamplerSpec,
    TensorDigest,
)
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.stale_variables import held_by
from ddpnb.rank.tasks.batches import leaves

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

DATA = ("dataset", "data_source")
"""The attributes in which samplers keep their data set, which is not copied."""
MAX_INDICES = 2_000_000
"""Of all epochs together, on one rank: 8 MB."""

Named = Iterator[tuple[str, Any]]


class Content(NamedTuple):
    """What is compared of a value."""

    parts: Mapping[Part, Mapping[str, Any]]
    """Tensors, and texts for what is none."""
    facts: Mapping[str, Any]
    """Further fields of ``Held``."""


class CannotCompareError(Exception):
    """A value is none of those that can be compared."""


def replica(
    names: Sequence[str], namespace: dict[str, Any], *, rank: int, device: torch.device
) -> RankReplica:
    """Return the digests of what this rank holds.

    Args:
        names: expressions; none: every module and optimizer among the variables.
        namespace: the variables of this rank's cells.
        rank: this one.
        device: this rank's, which may have random numbers of its own.
    """
    with torch.no_grad():
        found = names or list(own_names(namespace))
        held = {name: held_under(name, namespace) for name in found}
        return RankReplica(
            rank=rank,
            held=held,
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


def own_names(namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables that are modules or optimizers; none of which another is a part."""
    kinds = (nn.Module, torch.optim.Optimizer)
    found = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, kinds) and not name.startswith("_")
    }
    parts = {
        id(part)
        for value in found.values()
        if isinstance(value, nn.Module)
        for part in value.modules()
        if part is not value
    }
    seen: set[int] = set()
    for name, value in found.items():
        is_loss = isinstance(value, nn.Module) and not any(True for _ in tensors_in(value))
        if id(value) not in parts | seen and not is_loss:
            seen.add(id(value))
            yield name


def held_under(name: str, namespace: dict[str, Any]) -> Held:
    """Return what an expression gives, as digests; or why it cannot be compared."""
    try:
        value = eval(name, namespace)
    except NameError as error:
        return Held(is_missing=True, problem=meant(error, namespace))
    except Exception as error:  # noqa: BLE001  the user's expression
        return Held(problem=f"raises {summary_of(error)}")
    try:
        content = content_of(value, namespace)
    except CannotCompareError as error:
        return Held(problem=str(error))
    sharded = {
        part: num
        for part, tensors in content.parts.items()
        if (num := sum(not has_values(each) for each in tensors.values()))
    }
    return Held(
        parts={
            part: {key: digest(each) for key, each in tensors.items() if has_values(each)}
            for part, tensors in content.parts.items()
        },
        sharded=sharded,
        **content.facts,
    )


def meant(error: NameError, namespace: Mapping[str, Any]) -> str:
    """Return which variable was probably meant; empty if none is like it."""
    near = closest(error.name or "", [name for name in namespace if not name.startswith("_")])
    return f"did you mean {near}?" if near else ""


def content_of(value: Any, namespace: Mapping[str, Any]) -> Content:
    """Return what is compared of a value."""
    if isinstance(value, nn.Module):
        return module_content(value, namespace)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_content(value, namespace)
    if isinstance(value, Tensor):
        tensors = {"": value.detach()}
        gradient = value.grad if value.is_leaf else None
        gradients = {} if gradient is None else {Part.GRADIENTS: dict(plain("", gradient))}
        return Content({Part.VALUES: tensors, **gradients}, {})
    if isinstance(value, Mapping | list | tuple):
        found = {path: leaf for path, leaf in leaves(value) if isinstance(leaf, Tensor)}
        if found:
            return Content({Part.VALUES: found}, {})
    raise CannotCompareError(
        f"is {kind_of(value)}: name a model, an optimizer, a tensor or a dict of tensors"
    )


# -- modules -------------------------------------------------------------------------------


def unwrapped(value: Any) -> Any:
    """Return the module inside DDP."""
    return value.module if isinstance(value, DistributedDataParallel) else value


def module_content(wrapped: nn.Module, namespace: Mapping[str, Any]) -> Content:
    """Return parameters, buffers and gradients; no ``state_dict``, which may call collectives."""
    module = unwrapped(wrapped)
    ddp = ddp_around(wrapped, namespace)
    parameters = dict(module.named_parameters())
    gradients = {
        key: grad
        for name, parameter in parameters.items()
        if parameter.grad is not None
        for key, grad in plain(name, parameter.grad)
    }
    buffers = dict(module.named_buffers())
    if is_fully_sharded(module):
        parameters, gradients = dict.fromkeys(parameters), dict.fromkeys(gradients)
    facts = {
        "is_training": module.training,
        "batch_norm": frozenset(
            f"{path}.{name}".lstrip(".")
            for path, each in module.named_modules()
            if isinstance(each, BATCH_NORMS)
            for name, _ in each.named_buffers(recurse=False)
        ),
    }
    if ddp is not None:
        facts |= {
            "is_ddp": True,
            "syncs_gradients": ddp.require_backward_grad_sync,
            "syncs_buffers": sends_buffers(ddp),
        }
    parts = {Part.PARAMETERS: parameters, Part.BUFFERS: buffers, Part.GRADIENTS: gradients}
    return Content({part: found for part, found in parts.items() if found}, facts)


def ddp_around(module: nn.Module, namespace: Mapping[str, Any]) -> DistributedDataParallel | None:
    """Return the DDP that a module is, or is a part of, as far as a variable leads to it."""
    variables = [(name, value) for name, value in namespace.items() if not name.startswith("_")]
    for name, value in [("", module), *variables]:
        for _, held in held_by(name, value):
            if isinstance(held, DistributedDataParallel) and any(
                each is module for each in held.modules()
            ):
                return held
    return None


def sends_buffers(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP sends rank 0's buffers before a forward pass; by its newer name first."""
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        if hasattr(ddp, name):
            return bool(getattr(ddp, name))
    return True


def tensors_in(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether a part of it is wrapped by the first FSDP, which keeps flat shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules()
    )


# -- optimizers ----------------------------------------------------------------------------


def optimizer_content(optimizer: torch.optim.Optimizer, namespace: Mapping[str, Any]) -> Content:
    """Return state by parameter, and the settings of each group as texts."""
    modules = [unwrapped(each) for each in namespace.values() if isinstance(each, nn.Module)]
    names = {id(each): name for m in modules for name, each in m.named_parameters()}
    flat = {id(each) for m in modules if is_fully_sharded(m) for each in m.parameters()}
    zero = sys.modules.get("torch.distributed.optim")
    is_zero = zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)
    owned: Any = optimizer
    held = (owned.optim if is_zero else owned).state  # ZeRO keeps its shard in another optimizer
    state: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        which = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
        for key, each in group.items():
            if key not in ("params", "param_names"):
                settings[f"{key}{which}"] = f"{each.item() if isinstance(each, Tensor) else each}"
        for index, parameter in enumerate(group["params"]):
            owner = names.get(id(parameter), f"parameter {index}{which}")
            for key, each in held.get(parameter, {}).items():
                if isinstance(each, Tensor | int | float):
                    found = each if isinstance(each, Tensor) else torch.tensor(each)
                    is_shard = is_zero or id(parameter) in flat
                    state[f"{key} of {owner}"] = None if is_shard else found
    parts = {Part.STATE: state, Part.SETTINGS: settings}
    return Content({part: found for part, found in parts.items() if found}, {})


def steps_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each optimizer's name and its number of steps, where it counts them."""
    for name, value in namespace.items():
        if isinstance(value, torch.optim.Optimizer) and not name.startswith("_"):
            counts = [int(each["step"]) for each in value.state.values() if "step" in each]
            if counts or not value.state:
                yield name, max(counts, default=0)


# -- digests -------------------------------------------------------------------------------


def plain(name: str, tensor: Tensor) -> Named:
    """Yield a tensor; of a sparse one, its indices and values."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        yield f"{name} (indices)", whole.indices()
        yield f"{name} (values)", whole.values()
    else:
        yield name, tensor


def has_values(tensor: Any) -> bool:
    """Return whether this rank holds all values: not those of a shard, or of a meta tensor."""
    if isinstance(tensor, str):
        return True
    if tensor is None or nn.parameter.is_lazy(tensor):
        return False
    if (sharded := sys.modules.get("torch.distributed.tensor")) is not None and isinstance(
        tensor, sharded.DTensor
    ):
        return all(each.is_replicate() for each in tensor.placements)
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def chunks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements in pieces."""
    found: Any = tensor.detach()
    if hasattr(found, "to_local"):  # a DTensor of which each rank holds all
        found = found.to_local()
    found = found.int_repr() if found.is_quantized else found.resolve_conj().resolve_neg()
    yield from found.reshape(-1).split(CHUNK_ELEMENTS)


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
    states: dict[str, bytes] = {
        "torch": bytes(torch.get_rng_state().numpy()),
        "Python's random": repr(random.getstate()).encode(),
    }
    if device.type == "cuda":
        states["torch on the GPU"] = bytes(torch.cuda.get_rng_state(device).numpy())
    if "numpy.random" in sys.modules:
        with contextlib.suppress(TypeError):  # another generator was put in its place
            kind, keys, *rest = np.random.get_state()
            states["numpy"] = repr((kind, rest)).encode() + np.asarray(keys).tobytes()
    return {name: TensorDigest(digests=hashed(state)) for name, state in states.items()}


# -- samples -------------------------------------------------------------------------------


def samples(
    spec: SamplerSpec, namespace: dict[str, Any], *, rank: int, num_ranks: int, device: torch.device
) -> RankSamples:
    """Return the samples that this rank gets, by torch's own sampler, or a copy of the user's."""
    if spec.expression:
        held = sampler_in(spec.expression, namespace)
        layers = layers_of(held)
        data = [getattr(each, name) for each in layers for name in DATA if hasattr(each, name)]
        memo = {id(each): each for each in data}  # not copied
        sampler = copy.deepcopy(held, memo)
        num_samples = next((len(each) for each in data if hasattr(each, "__len__")), 0)
    else:
        num_samples = spec.num_samples
        sampler = DistributedSampler(
            range(num_samples),  # type: ignore[arg-type]  # all that it needs is a length
            num_replicas=num_ranks,
            rank=rank,
            shuffle=spec.shuffle,
            drop_last=spec.drop_last,
        )
    layers = layers_of(sampler)
    settable = [each for each in layers if hasattr(each, "set_epoch")]
    epochs: list[Indices] = []
    with preserve_globals(device):
        for epoch in range(spec.num_epochs):
            for each in settable if spec.sets_epoch else ():
                each.set_epoch(epoch)
            left = MAX_INDICES - sum(map(len, epochs))
            epochs.append(np.fromiter(itertools.islice(numbers(sampler), left + 1), dtype=np.int32))
            if len(epochs[-1]) > left:
                raise UserError(
                    f"hands out more than {MAX_INDICES:,} samples: take --epochs 1, or fewer -n."
                )
    return RankSamples(
        rank=rank,
        kind=type(layers[-1]).__name__,
        num_samples=num_samples,
        epochs=tuple(epochs),
        has_set_epoch=bool(settable),
    )


def sampler_in(name: str, namespace: dict[str, Any]) -> Any:
    """Return the sampler of a ``DataLoader``, or the sampler itself."""
    try:
        value = eval(name, namespace)
    except NameError as error:
        near = meant(error, namespace)
        raise UserError(
            f"has no {name}, and no stored run has that name{f'; {near}' if near else '.'}"
        ) from None
    if isinstance(value, DataLoader) and not isinstance(value.dataset, IterableDataset):
        return value.sampler if value.batch_sampler is None else value.batch_sampler
    if isinstance(value, DataLoader):
        raise UserError(
            f"has no sampler for {name}: its IterableDataset chooses the samples by its own code."
        )
    if isinstance(value, Sampler):
        return value
    raise UserError(f"holds {kind_of(value)} as {name}: name a sampler or a DataLoader.")


def layers_of(sampler: Any) -> list[Any]:
    """Return a sampler and those that it draws from, the innermost last."""
    layers = [sampler]
    while isinstance(inner := getattr(layers[-1], "sampler", None), Sampler):
        layers.append(inner)
    return layers


def numbers(sampler: Any) -> Iterator[int]:
    """Yield the samples of an epoch, also those of batches."""
    for item in sampler:
        if isinstance(item, list | tuple):
            yield from map(int, item)
        else:
            yield int(item)
