"""This rank's variables (ranks).

Takes variables and functions from the notebook, gives values and models to it, and finds what still
holds a process group that has ended.
"""

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import REMEDIES, RunSpec, StaleVariable
from ddpnb.protocol.variables import Parcel, dump, load, opened, packed, receive

REPLACED = (FunctionType, type, ModuleType, int, float, complex, str, bytes, type(None))
"""Functions, classes and constants: no training on this rank has changed one in place."""

MAX_ITEMS = 1000
"""A larger container holds data, not models."""


def take(parcel: Parcel, namespace: dict[str, Any]) -> None:
    """Put a parcel's variables into the namespace; all of them, or none where it raises.

    What its functions use comes along.  Where this rank has a variable of that name, its own is
    kept, unless it is a function, a class or a constant.
    """
    own = dict(namespace)
    try:
        named = receive(parcel)
    except BaseException:
        for name in namespace.keys() - own.keys():
            del namespace[name]
        namespace.update(own)
        raise
    kept = {name: value for name, value in own.items() if not isinstance(value, REPLACED)}
    namespace.update(kept | named)


_functions: dict[str, list[Any]] = {}
"""The functions that the latest comparison with functions trains, pickled, under their key."""


def keep_functions(key: str, parcel: Parcel) -> None:
    """Keep the functions that ``ddpnb.compare`` was called with, in place of earlier ones."""
    _functions.clear()
    _functions[key] = opened(parcel)


def notebook_functions(key: str, namespace: dict[str, Any]) -> Any:
    """Return the functions that were sent under a key, with these global variables.

    The cell that stands for them calls it, once a run: no run sees what another has changed.
    """
    if key not in _functions:
        raise UserError(
            "This rank does not have the functions of this comparison any more: call ddpnb.compare "
            "with them again."
        )
    return load(_functions[key], namespace)


class TrainedModels:
    """The latest comparison's trained models, the last of each strategy and rate (rank 0)."""

    def __init__(self) -> None:
        self._comparison = ""
        self._kept: dict[tuple[str, float], tuple[str, nn.Module, dict[str, Any]]] = {}
        """By strategy and learning rate: the run's id, its model, and the weights it ended with."""

    def keep(self, spec: RunSpec, model: object) -> None:
        """Keep a run's model in place of that of the repeat before."""
        if spec.comparison != self._comparison:
            self._comparison = spec.comparison
            self._kept.clear()
        if isinstance(model, nn.Module):
            weights = copy.deepcopy(model.state_dict())  # the model is lent to the snapshots
            self._kept[spec.strategy, spec.learning_rate] = spec.run_id, model, weights

    def of(self, run_id: str) -> nn.Module:
        """Return the model of a run, on the CPU and without gradients."""
        for kept_id, model, weights in self._kept.values():
            if kept_id == run_id:
                model.load_state_dict(weights)
                model.zero_grad(set_to_none=True)
                return model.cpu()
        raise UserError(
            "Rank 0 does not have this model: it keeps those of the latest comparison, of each "
            "strategy that has trained to its end, until the rank ends."
        )


def give(
    rank: int,
    namespace: dict[str, Any],
    expression: str,
    path: str,
    classes: Collection[str],
    num_copies: int,
) -> Parcel:
    """Evaluate an expression and return its value; raises what evaluating and pickling raise.

    Args:
        rank: this one, whose file for a large value is ``path-rank``.  The kernel removes it as
            soon as it has the answer, or does not wait any longer; then nothing is evaluated.
        namespace: the variables of this rank's cells.
        expression: the user's.
        path: empty where the kernel is on another host, and takes any value in its message.
        classes: names of the notebook's own classes.
        num_copies: on how many ranks the kernel asks for the value at the same time.
    """
    path = path and f"{path}-{rank}"
    if path and not os.path.exists(path):
        raise TimeoutError("the notebook does not wait for this value any longer")
    parts = dump(eval(expression, namespace), for_ranks=False, classes=classes)
    return packed(parts, path, num_copies=num_copies)


# -- what holds a process group that has ended -----------------------------------------------


def stale_variables(namespace: Mapping[str, object]) -> list[StaleVariable]:
    """Return the variables that hold a group, directly or one level down; in a module at any."""
    found: list[StaleVariable] = []
    for name, value in namespace.items():
        if name.startswith("_") or name in ("In", "Out"):  # IPython's history
            continue
        for path, item in held_by(name, value):
            is_part = any(path.startswith(f"{stale.name}.") for stale in found)
            if not is_part and (kind := kind_with_group(item)):
                found.append(StaleVariable(path, kind))
    return found


def kind_with_group(value: object) -> str:
    """Return which of the classes in ``REMEDIES`` a value is; empty if it is none of them."""
    # Compared by name, because importing them all takes a second.
    names = {c.__name__ for c in type(value).__mro__ if c.__module__.startswith("torch")}
    return next((kind for kind in REMEDIES if kind in names), "")


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
