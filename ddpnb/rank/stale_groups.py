"""The user's variables that still hold an earlier process group (ranks)."""

from collections.abc import Iterator, Mapping

from torch import nn

from ddpnb.protocol.messages import StaleVariable

KINDS = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "ZeroRedundancyOptimizer",
    "DeviceMesh",
    "ProcessGroup",
)
"""Classes of torch that keep the group they were made with.

They are compared by name, because importing them all takes a second.
"""

MAX_ITEMS = 1000
"""A larger container holds data, not models."""


def stale_variables(namespace: Mapping[str, object]) -> list[StaleVariable]:
    """Return the variables that hold a group, directly or one level down.

    In a module, a model is found at any depth.
    """
    found: list[StaleVariable] = []
    for name, value in namespace.items():
        if not is_users(name):
            continue
        if kind := kind_of(value):
            found.append(StaleVariable(name, kind))  # no need to look inside
            continue
        for path, held in held_by(name, value):
            if kind := kind_of(held):
                found.append(StaleVariable(path, kind))
    return found


def is_users(name: str) -> bool:
    """Return whether a variable is the user's own, not IPython's history."""
    return not name.startswith("_") and name not in {"In", "Out"}


def kind_of(value: object) -> str:
    """Return which of ``KINDS`` a value is; empty if it is none of them."""
    names = {c.__name__ for c in type(value).__mro__ if c.__module__.startswith("torch")}
    return next((kind for kind in KINDS if kind in names), "")


def held_by(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what a value holds, each with the expression that leads to it."""
    if isinstance(value, nn.Module):
        inside = dict(value.named_modules(prefix=name))
        outermost = (path for path in inside if not is_part_of_stale(path, inside))
        yield from ((path, inside[path]) for path in outermost)
    elif isinstance(value, dict | list | tuple):
        if len(value) <= MAX_ITEMS:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key!r}]", item) for key, item in pairs)
    elif type(value).__module__ == "__main__":
        yield from ((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())


def is_part_of_stale(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is part of another one that holds a group."""
    names = path.split(".")
    above = (".".join(names[:num]) for num in range(1, len(names)))
    return any(kind_of(modules.get(outer)) for outer in above)
