"""What does a magic take, and what is said of a line that it cannot read?  (Notebook side.)

The same is said of a call of its twin in Python.
"""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

from IPython.core import magic_arguments as ipython
from IPython.core.error import UsageError

from ddpnb.compat.python_internals import options_of
from ddpnb.errors import UserError, closest

Magic = TypeVar("Magic", bound=Callable[..., Any])

NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.+)")
NO_VALUE = re.compile(r"argument (\S+): expected one argument")
UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
"""How argparse puts what is wrong, which alone it tells."""

MISSING = re.compile(r"missing a required (?:keyword-only )?argument: '(\w+)'")
TWICE = re.compile(r"multiple values for argument '(\w+)'")
"""How ``inspect`` puts it."""


def magic_arguments() -> Callable[[Magic], Magic]:
    """Give a magic its parser, as IPython's own does, and a help that begins with the usage."""

    def give(magic: Magic) -> Magic:
        parsed: Magic = ipython.magic_arguments()(magic)
        parsed.__doc__ = (parsed.__doc__ or "").removeprefix("::").lstrip("\n")  # for Sphinx
        return parsed

    return give


def options(magic: object) -> list[str]:
    """Return the options of a magic, as its parser knows them."""
    parser: argparse.ArgumentParser | None = getattr(magic, "parser", None)
    if parser is None:
        return []
    return options_of(parser)


def arguments(magic: Callable[..., object], line: str) -> Namespace:
    """Return a magic's parsed line.

    Raises:
        UserError: where it cannot be parsed; says what is wrong with which word.
    """
    try:
        parsed: Namespace = ipython.parse_argstring(magic, line)
    except UsageError as error:
        raise UserError(_told(magic, str(error))) from None
    except ValueError as error:  # a quotation without an end
        raise UserError(f"{error} in {line.strip()!r}.") from None
    return parsed


def no_arguments(magic: str, line: str) -> None:
    """Raise a UserError where a magic that takes no argument was given one."""
    if line.strip():
        raise UserError(f"{magic} takes no arguments, but was given {line.strip()!r}.")


def _told(magic: Callable[..., object], error: str) -> str:
    """Say in the words of the user's line what argparse says of it."""
    name, known = magic.__name__, options(magic)
    if found := NUMBER.fullmatch(error):
        option, kind, given = found.groups()
        return f"{option} takes a {'whole ' if kind == 'int' else ''}number, not {given}."
    if found := NO_VALUE.fullmatch(error):
        return f"{found[1]} takes a value: %{name}? tells which."
    if found := UNKNOWN.match(error):
        return _has_no(name, "option", found[1].partition("=")[0], known)
    return f"{error}: %{name}? tells what it takes."


def not_bound(
    name: str, signature: Signature, named: Mapping[str, object], reason: str
) -> UserError:
    """Return the error for a call whose arguments do not fit the function.

    Args:
        name: what the function is called.
        signature: what it takes.
        named: the arguments that were given by name.
        reason: Python's, for what is neither missing nor unknown.
    """
    parameters = signature.parameters.values()
    listed = [each.name for each in parameters if each.kind is Parameter.VAR_POSITIONAL]
    known = [
        each.name
        for each in parameters
        if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    for given in named:
        if given in listed:
            return UserError(f"{name} takes {given} without a name: {name}('...', '...').")
        if given not in known:
            return UserError(_has_no(name, "argument", given, known))
    if found := MISSING.fullmatch(reason):
        return UserError(f"{name} needs {found[1]}: ddpnb.{name}? tells what it takes.")
    if found := TWICE.fullmatch(reason):
        return UserError(f"{name} was given {found[1]} twice: leave one of them out.")
    return UserError(f"{name}: {reason}; ddpnb.{name}? tells what it takes.")


def _has_no(name: str, kind: str, given: str, known: list[str]) -> str:
    """Say that there is no such option or argument, and which was likely meant."""
    if near := closest(given, known):
        return f"{name} has no {kind} {given}; did you mean {near}?"
    if not known:
        return f"{name} has no {kind} {given}; it takes none."
    return f"{name} has no {kind} {given}; its {kind}s are: {', '.join(known)}."
