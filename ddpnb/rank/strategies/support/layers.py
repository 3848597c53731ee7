"""Which parts of a model can be gathered one after the other?  (Every rank.)

Those that are surely called by themselves, as the blocks of a transformer are: torch gathers
what a module holds when it is called.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn


def layers_of(model: nn.Module) -> list[Any]:
    """Return what is gathered by itself, inner modules before those that hold them."""
    candidates = set(_listed(model))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    places: Counter[nn.Module] = Counter()
    holders: dict[str, nn.Module] = {}
    # A module that is registered at several places is met at each.
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
    """Yield the modules with parameters that stand in a list, at whatever depth the list is.

    A list is a ``Sequential``, or what cannot be called, as ``ModuleList`` and ``ModuleDict``:
    each module in it is called by itself.
    """
    for child in module.children():
        if not _is_list(module) or _is_list(child):
            yield from _listed(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward
