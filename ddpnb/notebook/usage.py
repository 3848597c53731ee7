"""What does a magic take, and what is said of a line that it cannot read?  (Notebook side.)"""

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core import magic_arguments as ipython
from IPython.core.error import UsageError
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ddpnb.compat.python_internals import options_of
from ddpnb.errors import UserError, closest

Magic = TypeVar("Magic", bound=Callable[..., Any])


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
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]
    name = magic.__name__
    try:
        parsed, unknown = parser.parse_known_args(arg_split(line))
    except UsageError as error:
        raise UserError(f"{error}; %{name}? explains it.") from None
    except ValueError as error:  # a quotation without an end
        raise UserError(f"{error} in {line.strip()!r}.") from None
    if unknown:
        word, known = unknown[0].partition("=")[0], options(magic)
        near = closest(word, known)
        advice = f"did you mean {near}?" if near else f"its options are: {', '.join(known)}."
        raise UserError(f"{name} has no option {word}; {advice}")
    return parsed


def no_arguments(magic: str, line: str) -> None:
    """Raise a UserError where a magic that takes no argument was given one."""
    if line.strip():
        raise UserError(f"{magic} takes no arguments, but was given {line.strip()!r}.")
