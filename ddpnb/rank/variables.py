"""Exchanges this rank's variables with the notebook.  Runs on the ranks.

A rank receives variables and functions from the notebook, and sends values and models back.  A
rank also finds variables that still hold a process group that has ended.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ddpnb.protocol.cell_messages import REMEDIES, StaleVariable
from ddpnb.protocol.errors import UserError, closest, summary_of
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.variables import Parcel, dump, load_parts, opened, packed, receive

REPLACED = (FunctionType, type, ModuleType, int, float, complex, str, bytes, type(None))
"""Types of functions, classes and constants.  Training cannot modify values of these types."""

MAX_ITEMS = 1000
"""Maximum number of items in containers that ddpnb searches for process groups."""


def take(parcel: Parcel, namespace: dict[str, Any]) -> None:
    """Put a parcel's variables into the namespace.  If an error occurs, change no variable.

    The parcel also contains the variables that its functions use.  If this rank already has one of
    these variables, the old value stays, unless the old value is a function, a class or a constant.
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
"""Maps the key of the latest ``ddpnb.compare`` call to the call's pickled functions."""


def keep_functions(key: str, parcel: Parcel) -> None:
    """Store the functions of a ``ddpnb.compare`` call, and drop the previous call's functions."""
    _functions.clear()
    _functions[key] = opened(parcel)


def notebook_functions(key: str, namespace: dict[str, Any]) -> Any:
    """Return the functions of a ``ddpnb.compare`` call, with ``namespace`` as global variables.

    The cell that ddpnb generates for the comparison calls this function once per run, and each call
    loads new copies.  So no run sees changes that another run has made.
    """
    if key not in _functions:
        raise UserError(
            "This rank no longer has the functions of this comparison. Call ddpnb.compare again."
        )
    return load_parts(_functions[key], namespace)


_models: dict[tuple[str, str, float], tuple[str, list[bytearray] | UserError]] = {}
"""The trained models of the latest comparison, on rank 0.  Maps the comparison, the strategy and
the learning rate to the latest run's id and its pickled model, or to the error of pickling."""


def keep_model(spec: RunSpec, model: nn.Module) -> None:
    """Keep a copy of a run's model, and drop the model of the strategy's previous repeat.

    The copy is pickled, because the model may hold memory of the device, also in its hooks.
    """
    if any(comparison != spec.comparison_id for comparison, *_ in _models):
        _models.clear()
    kept: list[bytearray] | UserError
    try:
        kept = [*map(bytearray, dump(model, for_ranks=False))]
    except Exception as error:  # noqa: BLE001  ``trained_model`` raises it
        kept = UserError(f"This model cannot be pickled ({summary_of(error)}).")
    _models[spec.comparison_id, spec.strategy, spec.learning_rate] = spec.run_id, kept


def trained_model(run_id: str) -> nn.Module:
    """Return the trained model of a run, on the CPU and without gradients."""
    kept = dict(_models.values()).get(run_id)
    if isinstance(kept, UserError):
        raise kept
    if kept is not None:
        model: nn.Module = load_parts(kept)
        return model
    raise UserError(
        "Rank 0 does not have this model. Rank 0 keeps only the models of the latest "
        "comparison's finished runs, and it loses these models if it restarts."
    )


def give(
    rank: int,
    namespace: dict[str, Any],
    expression: str,
    path: str,
    classes: Collection[str],
    num_copies: int,
) -> Parcel:
    """Evaluate an expression and return its pickled value.  This function catches no errors.

    Args:
        rank: this rank's number.  The rank writes a large value to the file ``path-rank``.  The
            kernel removes the file once the kernel has the answer or stops waiting.  If the file is
            missing, ``give`` raises ``TimeoutError`` and does not evaluate the expression.
        namespace: the variables of this rank's cells.
        expression: the user's expression.
        path: the beginning of the file's path.  If the kernel is on another host, ``path`` is empty
            and every value is sent in a message.
        classes: names of classes that the notebook defines.
        num_copies: the number of ranks that the kernel asks for the value at the same time.
    """
    path = path and f"{path}-{rank}"
    if path and not os.path.exists(path):
        raise TimeoutError("the notebook no longer waits for this value")
    parts = dump(eval(expression, namespace), for_ranks=False, classes=classes)
    return packed(parts, path, num_copies=num_copies)


def value_of(expression: str, namespace: Mapping[str, Any], **others: Any) -> Any:
    """Evaluate the user's expression on this rank.  Raise UserError if the expression fails."""
    try:
        return eval(expression, {**namespace, **others})  # runs the user's code, as a cell does
    except NameError as error:
        near = closest(error.name or "", [name for name in namespace if not name.startswith("_")])
        hint = f"; did you mean {near}?" if near else ". Define it in a %%ddp cell."
        raise UserError(f"{error.name} is not defined{hint}") from None
    except Exception as error:
        raise UserError(f"{expression} raised {summary_of(error).rstrip('.')}.") from error


# -- variables that hold a process group that has ended --------------------------------------


def variables_with_group(namespace: Mapping[str, object]) -> dict[StaleVariable, int]:
    """Return the variables that hold a process group directly, in an item or in a submodule.

    The values are the ids of the objects.
    """
    found: dict[StaleVariable, int] = {}
    for name, value in namespace.items():
        if name.startswith("_") or name in ("In", "Out"):  # IPython's history
            continue
        for path, item in held_by(name, value):
            is_part = any(path.startswith(f"{stale.name}.") for stale in found)
            if not is_part and (kind := kind_with_group(item)):
                found[StaleVariable(path, kind)] = id(item)
    return found


def kind_with_group(value: object) -> str:
    """Return the value's class name if ``REMEDIES`` contains it; otherwise an empty string."""
    # Compared by name, because importing all these classes takes a second.
    names = {c.__name__ for c in type(value).__mro__ if c.__module__.startswith("torch")}
    return next((kind for kind in REMEDIES if kind in names), "")


def held_by(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a value and the values in it, as (expression, value) pairs, e.g. ``("a[0]", 1)``."""
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
