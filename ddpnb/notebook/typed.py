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
from typing import Any, ParamSpec, TypeVar

from ddpnb.errors import UserError, kind_of

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


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a function refuse arguments that are not of the types it is annotated with.

    Numbers of numpy are numbers too, and a whole number does where any number does.

    Raises:
        UserError: by the function, when it is called with such an argument.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name, given in signature.bind(*args, **kwargs).arguments.items():
            is_many = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in given if is_many else [given]:
                _check(f"each of {name}" if is_many else name, value, hints[name])
        return function(*args, **kwargs)

    return call


def _check(name: str, value: object, hint: Any) -> None:
    wanted = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if object in wanted or any(_is(value, kind) for kind in wanted):
        return
    told = " or ".join(WORDS[typing.get_origin(kind) or kind] for kind in wanted)
    is_short = isinstance(value, str | Real) and len(repr(value)) < 40
    raise UserError(f"{name} is {told}, not {repr(value) if is_short else kind_of(value)}.")


def _is(value: object, kind: Any) -> bool:
    if typing.get_origin(kind) is Sequence:
        (of,) = typing.get_args(kind)
        if isinstance(value, str) or not isinstance(value, Sequence):
            return False
        return all(_is(each, of) for each in value)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)
