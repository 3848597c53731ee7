"""Does a call from Python give each argument as what it is annotated as?  (Notebook side.)

What magics are given, their parser checks; their twins in Python are checked here, before
anything is begun, so that a mistake is one sentence and not a traceback of ddpnb's own.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from ddpnb.errors import UserError, kind_of
from ddpnb.notebook.usage import not_bound

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Sequence: "a list of texts",
    NoneType: "None",
}

_MISFIT: Final = object()
"""What is returned for a value that is not of the kind asked for."""


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a function refuse arguments that are not what it is annotated with.

    Numbers of numpy are numbers too, and a whole number does where any number does: the
    function is given Python's own, which can be stored and sent anywhere.

    Raises:
        UserError: by the function, when it is called with such an argument, with one that it
            does not have, or without one that it needs.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise not_bound(function.__name__, signature, kwargs, str(error)) from None
        for name, given in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                each = (_of_many(name, value, hints[name]) for value in given)
                bound.arguments[name] = tuple(each)
            else:
                bound.arguments[name] = _converted(name, given, hints[name])
        return function(*bound.args, **bound.kwargs)

    return call


def _of_many(name: str, value: object, hint: Any) -> Any:
    """Return one of the names that a call lists, as a text."""
    if hint is str and isinstance(value, type):
        raise UserError(
            f"each of {name} is a text, not a class: write its name, {value.__name__!r}."
        )
    return _converted(f"each of {name}", value, hint)


def _converted(name: str, value: object, hint: Any) -> Any:
    """Return a value as what it is annotated as.

    Raises:
        UserError: it is nothing of the kind.
    """
    wanted = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if object in wanted:
        return value
    for kind in wanted:
        try:
            if (found := _as(value, kind)) is not _MISFIT:
                return found
        except OverflowError:
            raise UserError(f"{name} is too large a number.") from None
    told = " or ".join(WORDS[typing.get_origin(kind) or kind] for kind in wanted)
    is_short = isinstance(value, str | Real) and len(repr(value)) < 40
    raise UserError(f"{name} is {told}, not {repr(value) if is_short else kind_of(value)}.")


def _as(value: object, kind: Any) -> Any:
    """Return a value as Python's own of a kind; ``_MISFIT`` where it is none.

    Raises:
        OverflowError: a whole number is too large for a number.
    """
    if typing.get_origin(kind) is Sequence:
        return _as_texts(value)
    if kind is bool:
        return bool(value) if isinstance(value, bool | np.bool_) else _MISFIT
    if kind in (int, float):
        number = Integral if kind is int else Real
        is_number = isinstance(value, number) and not isinstance(value, bool)
        return kind(value) if is_number else _MISFIT
    if kind is str:
        return str(value) if isinstance(value, str) else _MISFIT
    return value if isinstance(value, kind) else _MISFIT


def _as_texts(value: object) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return _MISFIT
    is_text = all(isinstance(each, str) for each in value)
    return [str(each) for each in value] if is_text else _MISFIT
