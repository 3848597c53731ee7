"""Takes variables from the notebook and gives values to it (ranks)."""

import os
from collections.abc import Collection
from types import FunctionType, ModuleType
from typing import Any

from ddpnb.protocol.errors import closest
from ddpnb.protocol.variables import (
    LARGE_BYTES,
    Parcel,
    culprit,
    dump,
    in_file,
    in_message,
    receive,
    size_of,
)

NOBODY_WAITS = "the notebook does not wait for this value any longer"

IMMUTABLE = (FunctionType, type, ModuleType, int, float, complex, str, bytes, type(None))
"""What can only be replaced: no training on this rank has changed it in place."""

MISSING = object()


class Received:
    """Takes variables from the notebook, and knows which of them it may replace."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        """Functions, classes and constants that came, with their names on this rank.

        Of large texts only the size and hash: what the user deletes is to be freed.
        """

    def take(self, parcel: Parcel, namespace: dict[str, Any]) -> None:
        """Put a parcel's variables into the namespace; all of them, or none where it raises.

        What its functions use comes along.  Where this rank has a variable of that name, its own
        is kept, unless it too came from the notebook and is a function, a class or a constant.
        """
        own = dict(namespace)
        try:
            named = receive(parcel)
        except BaseException:
            for name in namespace.keys() - own.keys():
                del namespace[name]
            namespace.update(own)
            raise
        for name, value in own.items():
            if namespace[name] is not value and not self._may_replace(name, value):
                namespace[name] = value
        namespace.update(named)
        came = {name for name, value in namespace.items() if own.get(name, MISSING) is not value}
        kept = {
            name for name in self._values if self._may_replace(name, namespace.get(name, MISSING))
        }
        self._values = {
            name: token_of(namespace[name])
            for name in came | named.keys() | kept
            if isinstance(namespace[name], IMMUTABLE)
        }

    def _may_replace(self, name: str, value: object) -> bool:
        held = self._values.get(name, MISSING)
        return held is value or (isinstance(held, tuple) and held == token_of(value))


def token_of(value: object) -> object:
    """Return what a value is recognized by: the value itself, or the size and hash of a text."""
    if isinstance(value, str | bytes) and len(value) >= LARGE_BYTES:
        return type(value), len(value), hash(value)
    return value


def give(
    expression: str,
    namespace: dict[str, Any],
    *,
    path: str,
    classes: Collection[str],
    num_copies: int,
) -> Parcel:
    """Evaluate an expression and return its value; raises what evaluating and pickling raise.

    Args:
        expression: the user's.
        namespace: the variables of this rank's cells.
        path: an empty file for large values.  The kernel removes it as soon as it has the answer,
            or does not wait for one any longer; then nothing is evaluated.  Empty: the kernel is on
            another host, and takes any value in its message.
        classes: names of the notebook's own classes.
        num_copies: on how many ranks the kernel asks for the value at the same time.
    """
    if path and not os.path.exists(path):
        raise TimeoutError(NOBODY_WAITS)
    try:
        value = eval(expression, namespace)
    except NameError as error:
        raise with_advice(error, namespace) from None
    try:
        parts = dump(value, for_ranks=False, classes=classes)
    except Exception as error:
        whole = expression if expression.isidentifier() else f"({expression})"
        name, cause = culprit(whole, value, error, for_ranks=False, classes=classes)
        if name == whole:
            raise
        raise TypeError(f"{name}: {cause}") from cause
    if size_of(parts) < LARGE_BYTES or not path:
        return in_message(parts)
    file = os.open(path, os.O_WRONLY)  # not created: where it is gone, nobody waits
    try:
        return in_file(parts, file, path, num_copies=num_copies)
    finally:
        os.close(file)


def with_advice(error: NameError, namespace: dict[str, Any]) -> NameError:
    """Return the error with the names of this rank's variables that were probably meant."""
    names = [name for name in namespace if not name.startswith("_")]
    near = closest(error.name or "", names)
    return NameError(f"{error}; did you mean {near}?" if near else str(error), name=error.name)
