"""The decorator for Python functions that do the same as a magic.  Runs in the kernel."""

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import ParamSpec, TypeVar

from ddpnb.cluster.interrupts import noted_interrupts
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CHOICES = "    **choices: as listed."
"""The line of a docstring that is replaced by the descriptions of the options."""


def twin(
    *groups: Mapping[str, Option],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that adds the options in ``groups`` to a function's signature and help.

    The function receives the options as ``**choices``.  An unknown or missing argument raises a
    ``UserError``.  An interrupt is raised only where it does no harm.
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
                if unknown in options:  # the name of a field, and of a DataFrame's column
                    near = options[unknown].keyword
                else:
                    near = closest(unknown, list(signature.parameters))
                name = function.__name__
                advice = f"did you mean {near}?" if near else f"type ddpnb.{name}? for help."
                raise UserError(f"{name}: {error}; {advice}") from None
            with noted_interrupts():
                return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        lines = (f"    {each.keyword}: {_help_in_python(each)}." for each in added)
        doc = inspect.getdoc(function) or ""  # without the indentation that Python 3.13 removes
        call.__doc__ = doc.replace(CHOICES, "\n".join(lines))
        return call

    return decorate


def _help_in_python(option: Option) -> str:
    """Return an option's help, with an example value at the end if the option takes a value."""
    if option.default is True:
        return f"if False, {option.meaning}"
    is_value = any(map(str.isdigit, option.example))  # otherwise a placeholder in capitals
    return f'{option.meaning}; example: "{option.example}"' if is_value else option.meaning
