"""Lists the samples that this rank gets, from a copy of its sampler.  Runs on the ranks."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.protocol.inspection import Indices, RankSamples, SamplerSpec
from ddpnb.protocol.messages import RankState
from ddpnb.rank.random_state import preserve_globals
from ddpnb.rank.variables import value_of

DATA = ("dataset", "data_source")
"""The attributes in which samplers keep their data set.  ddpnb does not copy the data set."""
MAX_INDICES = 2_000_000
"""Maximum number of indices for one rank in all epochs together.  These indices take 8 MB."""


def handed_out(spec: SamplerSpec, state: RankState, namespace: Mapping[str, Any]) -> RankSamples:
    """Return this rank's samples, from a copy of the user's sampler or a ``DistributedSampler``."""
    if spec.expression:
        held = sampler_in(spec.expression, namespace)
        found = [getattr(each, name, None) for each in samplers_in(held) for name in DATA]
        data = [each for each in found if each is not None]
        sampler = copy.deepcopy(held, {id(each): each for each in data})
        num_samples = next((len(each) for each in data if hasattr(each, "__len__")), 0)
    else:
        num_samples = spec.num_samples
        sampler = DistributedSampler(
            range(num_samples),  # type: ignore[arg-type]  # only its length is used
            num_replicas=state.world_size,
            rank=state.rank,
            shuffle=spec.shuffle,
            drop_last=spec.drop_last,
        )
    layers = samplers_in(sampler)
    settable = [each for each in layers if hasattr(each, "set_epoch")]
    was_set = any(getattr(each, "epoch", 1) for each in settable)
    sets_epoch = spec.sets_epoch and (was_set or not spec.expression)
    epochs: list[Indices] = []
    with preserve_globals(torch.device(state.device)):
        for epoch in range(spec.num_epochs):
            for each in settable if sets_epoch else ():
                each.set_epoch(epoch)
            epochs.append(
                np.fromiter(itertools.islice(numbers(sampler), MAX_INDICES), dtype=np.int32)
            )
            if sum(map(len, epochs)) >= MAX_INDICES:
                raise UserError(
                    f"A rank must get fewer than {MAX_INDICES:,} samples. Lower --epochs or -n."
                )
    return RankSamples(
        kind=type(layers[-1]).__name__,
        num_samples=num_samples,
        epochs=tuple(epochs),
        has_set_epoch=bool(settable),
    )


def sampler_in(name: str, namespace: Mapping[str, Any]) -> Any:
    """Return the sampler of a ``DataLoader``, or the value itself if it is a sampler."""
    value = value_of(name, namespace)
    if isinstance(value, DataLoader) and isinstance(value.dataset, IterableDataset):
        raise UserError(f"{name} has no sampler, because it reads from an IterableDataset.")
    if isinstance(value, DataLoader):
        return value.sampler if value.batch_sampler is None else value.batch_sampler
    if not isinstance(value, Sampler):
        raise UserError(f"{name} is {kind_of(value)}, not a sampler or a DataLoader.")
    return value


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers inside it, with the innermost sampler last."""
    layers = [sampler]
    while isinstance(inner := getattr(layers[-1], "sampler", None), Sampler):
        layers.append(inner)
    return layers


def numbers(sampler: Any) -> Iterator[int]:
    """Yield the sample numbers of an epoch, from a sampler or a batch sampler."""
    for item in sampler:
        yield from map(int, item if isinstance(item, list | tuple) else [item])
