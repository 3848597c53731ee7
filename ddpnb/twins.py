"""What makes a function the twin of a magic in Python (kernel)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import ParamSpec, TypeVar

from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CHOICES = "    **choices: as listed."
"""The line of a docstring that the descriptions of the options replace."""


def twin(
    *groups: Mapping[str, Option],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Have a function take the options of specs as ``**choices``.

    The options are in its signature and its help.  An argument that is unknown or missing raises a
    ``UserError``; the function reads the options itself.
    """
    options = {name: each for group in groups for name, each in group.items()}

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        own = inspect.signature(function)
        added = [each for each in options.values() if each.keyword not in own.parameters]
        signature = own.replace(
            parameters=[
                *(each for each in own.parameters.values() if each.name != "choices"),
                *(Parameter(o.keyword, Parameter.KEYWORD_ONLY, default=o.default) for o in added),
            ]
        )

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                if unknown in options:  # the name of the spec's field, as in a DataFrame
                    near = options[unknown].keyword
                else:
                    near = closest(unknown, list(signature.parameters))
                name = function.__name__
                advice = f"did you mean {near}?" if near else f"ddpnb.{name}? explains it."
                raise UserError(f"{name}: {error}; {advice}") from None
            return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        lines = (f"    {each.keyword}: {_help_in_python(each)}." for each in added)
        doc = inspect.getdoc(function) or ""  # without the indentation that Python 3.13 removes
        call.__doc__ = doc.replace(CHOICES, "\n".join(lines))
        return call

    return decorate


def _help_in_python(option: Option) -> str:
    """Return an option's line of help, after a value of which it is true."""
    if option.default is True:
        return f"False: {option.meaning}"
    is_value = any(map(str.isdigit, option.example))  # else a word in capitals
    return f'"{option.example}": {option.meaning}' if is_value else option.meaning
