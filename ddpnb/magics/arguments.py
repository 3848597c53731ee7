"""The arguments of the magics: how they are declared, parsed and explained (kernel)."""

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core import magic_arguments as ipython
from IPython.core.error import UsageError
from IPython.core.magic_arguments import ArgDecorator
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ddpnb.compat.python_internals import options_of
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option
from ddpnb.protocol.training_options import training_options

Magic = TypeVar("Magic", bound=Callable[..., Any])


def magic_arguments() -> Callable[[Magic], Magic]:
    """Give a magic its parser, as IPython's decorator does; its help begins with the usage."""

    def decorate(magic: Magic) -> Magic:
        decorated: Magic = ipython.magic_arguments()(magic)
        help_text = decorated.__doc__ or ""
        decorated.__doc__ = help_text.removeprefix("::").lstrip("\n")  # markup for Sphinx
        return decorated

    return decorate


def options(magic: object) -> list[str]:
    """Return the option strings of a magic's parser."""
    parser: argparse.ArgumentParser | None = getattr(magic, "parser", None)
    if parser is None:
        return []
    return options_of(parser)


def arguments(magic: Callable[..., object], line: str) -> Namespace:
    """Parse a magic's line.

    Raises:
        UserError: the line is wrong; names the word and the problem.
    """
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]
    name = magic.__name__
    try:
        parsed, unknown = parser.parse_known_args(arg_split(line))
    except UsageError as error:
        raise UserError(f"{error}; %{name}? explains it.") from None
    except ValueError as error:  # an unclosed quotation
        raise UserError(f"{error} in {line.strip()!r}.") from None
    if unknown:
        word, known = unknown[0].partition("=")[0], options(magic)
        near = closest(word, known)
        advice = f"did you mean {near}?" if near else f"its options are: {', '.join(known)}."
        raise UserError(f"{name} has no option {word}; {advice}")
    return parsed


def no_arguments(magic: str, line: str) -> None:
    """Raise a UserError if there are arguments."""
    if line.strip():
        raise UserError(f"{magic} takes no arguments, but was given {line.strip()!r}.")


class training_arguments(ArgDecorator):  # noqa: N801  as IPython's own
    """Adds an option for each choice of a training, grouped under headings."""

    def add_to_parser(self, parser: argparse.ArgumentParser, group: object) -> None:
        """Add the options."""
        headings: dict[str, Any] = {}
        for _, option in training_options():
            if option.group not in headings:
                headings[option.group] = parser.add_argument_group(option.group)
            headings[option.group].add_argument(option.flag, **_settings(option))


def catalogue_text() -> str:
    """Return the strategies and tasks with their options, for the end of a help text."""
    lines: list[str] = []
    for heading, entries in (("strategies", STRATEGIES), ("tasks", TASKS)):
        lines += ["", f"{heading}:"]
        for name, entry in entries.items():
            lines.append(f"  {name:<17}  {entry.about}")
            for key, option in entry.options.items():
                values = "|".join(option.values) or option.default
                lines.append(f"    {name}:{key}={values}  {option.about}")
    return "\n".join(lines[1:])


def _settings(option: Option) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option."""
    about = option.meaning.replace("%", "%%")
    if option.value_kind is bool:
        return {"action": "store_true", "help": about}
    if option.default not in (None, (), "", CELL_TASK):
        about = f"{about} [{str(option.default).removesuffix('.0')}]"
    settings = {"metavar": option.example, "help": about}
    if option.value_kind is tuple:
        settings["action"] = "append"
    return settings | {"dest": option.keyword, "default": argparse.SUPPRESS}
