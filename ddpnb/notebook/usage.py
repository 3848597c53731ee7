"""What does a magic take, and what is said of a line that it cannot read?  (Notebook side.)"""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core import magic_arguments as ipython
from IPython.core.error import UsageError

from ddpnb.errors import UserError, closest

Magic = TypeVar("Magic", bound=Callable[..., Any])

NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.+)")
NO_VALUE = re.compile(r"argument (\S+): expected one argument")
UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
"""How argparse puts what is wrong, which alone it tells."""


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
    return [option for action in parser._actions for option in action.option_strings]


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
        given = found[1].partition("=")[0]
        if near := closest(given, known):
            return f"{name} has no option {given}; did you mean {near}?"
        return f"{name} has no option {given}; its options are: {', '.join(known)}."
    return f"{error}: %{name}? tells what it takes."
