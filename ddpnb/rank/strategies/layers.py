"""Which modules ``fsdp`` gathers one by one (ranks)."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


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


def types_of_layers(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Yield the types of the trained parameters of each layer, then of those in no layer."""
    seen: set[nn.Parameter] = set()
    for layer in (*layers_of(model), model):
        held = set(layer.parameters()) - seen
        seen |= held
        yield {parameter.dtype for parameter in held if parameter.requires_grad}
