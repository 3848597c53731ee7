"""Does a call from Python give each argument as what it is annotated as?  (Notebook side.)

The parser of a magic checks what it is given; its twin in Python is checked here, before
anything is begun, so that a mistake is one sentence and not a traceback of ddpnb's own.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar

from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import as_kind

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a function refuse arguments that are not what it is annotated with.

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
            near = closest(next((n for n in kwargs if n not in signature.parameters), ""), names)
            advice = f"did you mean {near}?" if near else f"ddpnb.{function.__name__}? explains it."
            raise UserError(f"{function.__name__}: {error}; {advice}") from None
        for name, given in bound.arguments.items():
            if signature.parameters[name].kind is Parameter.VAR_POSITIONAL:
                each = (as_kind(f"each of {name}", value, hints[name]) for value in given)
                bound.arguments[name] = tuple(each)
            else:
                bound.arguments[name] = _as_hinted(name, given, hints.get(name, object))
        return function(*bound.args, **bound.kwargs)

    names = list(signature.parameters)
    return call


def _as_hinted(name: str, value: Any, hint: Any) -> Any:
    """Return a value as what it is annotated as; see ``as_kind``."""
    kinds = typing.get_args(hint) or (hint,)
    if object in kinds or any(type(value) is kind for kind in kinds):
        return value
    if isinstance(value, kinds) and not isinstance(value, bool | str | float):
        return value  # such as a path
    wanted = next(kind for kind in (int, float, str, bool) if kind in kinds)
    return as_kind(name, value, wanted)
