"""Which variables still hold a process group that has ended?  (ranks)"""

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
    """Return the variables that hold a group, directly or one level down; in a module at any."""
    found: list[StaleVariable] = []
    for name, value in namespace.items():
        if name.startswith("_") or name in ("In", "Out"):  # IPython's history
            continue
        for path, item in held_by(name, value):
            is_part = any(path.startswith(f"{stale.name}.") for stale in found)
            if not is_part and (kind := kind_of(item)):
                found.append(StaleVariable(path, kind))
    return found


def kind_of(value: object) -> str:
    """Return which of ``KINDS`` a value is; empty if it is none of them."""
    names = {c.__name__ for c in type(value).__mro__ if c.__module__.startswith("torch")}
    return next((kind for kind in KINDS if kind in names), "")


def held_by(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a value and what it holds, each with the expression that leads to it."""
    if isinstance(value, nn.Module):
        yield from value.named_modules(prefix=name)
        return
    yield name, value
    if isinstance(value, dict | list | tuple):
        if len(value) <= MAX_ITEMS:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key!r}]", item) for key, item in pairs)
    elif type(value).__module__ == "__main__":
        yield from ((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())
