"""Declares public functions and the magics that call them.  Runs in the kernel.

The parameters of a function are the arguments of its magic, and its docstring is the help of both.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from ddpnb.cluster.interrupts import noted_interrupts
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

CHOICES_LINE = "    **choices: as listed."
"""The line of a docstring that is replaced by the descriptions of the options."""
SECTION = re.compile(r"\n(?:Args|Returns|Raises):\n")
PARAMETER = re.compile(r"^    \*{0,2}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""Matches a parameter's description in a docstring."""
Words = Literal["shell", "python", "expression"]
"""How a line is split: as in a shell, into Python expressions, or into one expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Magic:
    """A magic that calls a function."""

    name: str
    function: Callable[..., Any]
    help: str
    parameters: Mapping[str, Parameter]
    """The function's own parameters.  ``source`` is the cell; a default makes the cell optional."""
    arguments: Mapping[str, Option]
    """The arguments on the magic's line, by Python name.  Flags of options begin with a dash."""
    words: Words
    show: Callable[[Any], object] | None
    """Shows the function's result.  If None, the magic returns the result."""

    @property
    def kind(self) -> Literal["line", "cell", "line_cell"]:
        """Whether the magic takes a line, a cell, or a line with or without a cell."""
        source = self.parameters.get("source")
        if source is None:
            return "line"
        return "cell" if source.default is Parameter.empty else "line_cell"


MAGICS: dict[str, Magic] = {}
"""All magics.  The decorators add them."""


def public(
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
        doc = inspect.getdoc(function) or ""  # without the indentation that Python 3.13 removes
        lines = (f"    {each.keyword}: {_help_in_python(each)}." for each in added)
        call.__doc__ = doc.replace(CHOICES_LINE, "\n".join(lines))
        return call

    return decorate


def magic(
    name: str,
    *groups: Mapping[str, Option],
    words: Words = "shell",
    show: Callable[[Any], object] | None = None,
    **flags: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator like ``public`` that also declares the magic ``%name``.

    Keyword-only parameters become options such as ``--ranks``, and a parameter ``n`` becomes
    ``-n``.  ``flags`` names other flags and values, such as ``module="-m", save="--save FILE"``.
    ``words`` and ``show`` are fields of ``Magic``.
    """
    options = {each.keyword: each for group in groups for each in group.values()}

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        doc = inspect.getdoc(function) or ""
        parameters = {
            key: each
            for key, each in inspect.signature(function).parameters.items()
            if key not in options and key != "choices"
        }
        about = {key: " ".join(text.split()).rstrip(".") for key, text in PARAMETER.findall(doc)}
        own = {
            key: _argument(each, about[key], flags.get(key, ""))
            for key, each in parameters.items()
            if key != "source"
        }
        others = {key: each for key, each in options.items() if each.flag.startswith("-")}
        call = public(*groups)(function)
        MAGICS[name] = Magic(
            name=name,
            function=call,
            help=SECTION.split(doc)[0].strip(),
            parameters=parameters,
            arguments=own | others,
            words=words,
            show=show,
        )
        return call

    return decorate


def adapter(name: str, **added: Option) -> Callable[[Function], Function]:
    """Return a decorator: a magic calls the decorated function, and has arguments for it too.

    The function's ``**choices`` are the magic's other arguments.
    """

    def decorate(function: Function) -> Function:
        declared, own = MAGICS[name], inspect.signature(function).parameters
        MAGICS[name] = replace(
            declared,
            function=function,
            parameters={**declared.parameters, **own},
            arguments={**declared.arguments, **added},
        )
        return function

    return decorate


def _argument(parameter: Parameter, about: str, flag: str) -> Option:
    name, is_option = parameter.name, parameter.kind is Parameter.KEYWORD_ONLY
    usual = f"-{name}" if len(name) == 1 else f"--{name}" if is_option else name
    flag, _, value = flag.partition(" ")
    kind = (*get_args(parameter.annotation), parameter.annotation)[0]  # ``int | None``
    example = value or ("N" if kind is int else name.upper())
    return Option(
        default=parameter.default, about=about, kind=kind, flag=flag or usual, example=example
    )


def _help_in_python(option: Option) -> str:
    """Return an option's help, with an example value at the end if the option takes a value."""
    if option.default is True:
        return f"if False, {option.meaning}"
    is_value = any(map(str.isdigit, option.example))  # otherwise a placeholder in capitals
    return f'{option.meaning}; example: "{option.example}"' if is_value else option.meaning
