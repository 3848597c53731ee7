"""What a user chose, checked: arguments from Python, and the choices of a training (kernel).

A magic's parser checks its line.  A call from Python is checked here, before anything starts,
so that a mistake is one sentence and not a traceback from inside ddpnb.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar

from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import as_kind
from ddpnb.protocol.training_options import TrainingSpec, training_options

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def make_training_spec(
    choices: Mapping[str, Any], *, in_python: bool = False, **others: Any
) -> TrainingSpec:
    """Return the training that the user chose.

    Args:
        choices: texts or values by the options' names in Python; other names are ignored.
        in_python: whether errors use the options' names in Python, or a magic's flags.
        **others: fields that are not options.

    Raises:
        UserError: a choice is not possible.
    """
    fields = {
        name: option.read(option.keyword if in_python else option.flag, choices[option.keyword])
        for name, option in training_options()
        if option.keyword in choices
    }
    return TrainingSpec(**fields, **others)


def takes_training_options(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """Replace ``**choices`` by every option of a training, in a function's signature and help."""
    options = [option for _, option in training_options()]
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    own += [Parameter(o.keyword, Parameter.KEYWORD_ONLY, default=o.default) for o in options]
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    lines = "\n".join(f"    {option.keyword}: {option.meaning}." for option in options)
    doc = inspect.getdoc(function) or ""  # without the indentation that Python 3.13 removes
    function.__doc__ = doc.replace("    **choices: as listed.", lines)
    return function


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a function refuse arguments that do not fit its signature and annotations.

    Raises:
        UserError: when the function is called with an argument of the wrong type, with an
            unknown one, or without a required one.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), "")
            near = closest(unknown, list(signature.parameters))
            advice = f"did you mean {near}?" if near else f"ddpnb.{function.__name__}? explains it."
            raise UserError(f"{function.__name__}: {error}; {advice}") from None
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is Parameter.VAR_POSITIONAL:
                each = (as_kind(f"each of {name}", one, hints[name]) for one in value)
                bound.arguments[name] = tuple(each)
            else:
                bound.arguments[name] = _as_annotated(name, value, hints.get(name, object))
        return function(*bound.args, **bound.kwargs)

    return call


def _as_annotated(name: str, value: Any, hint: Any) -> Any:
    """Return a value as the type that it is annotated with; see ``as_kind``."""
    kinds = typing.get_args(hint) or (hint,)
    if object in kinds or any(type(value) is kind for kind in kinds):
        return value
    if isinstance(value, kinds) and not isinstance(value, bool | str | float):
        return value  # such as a path
    return as_kind(name, value, next(kind for kind in (int, float, str, bool) if kind in kinds))
