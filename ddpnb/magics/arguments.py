"""The arguments of the magics: how they are declared, parsed and explained (kernel)."""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import ArgDecorator
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option


def flags(magic: object) -> list[str]:
    """Return the options of a magic, as they are written."""
    parser: argparse.ArgumentParser | None = getattr(magic, "parser", None)
    return re.findall(r"\[(--?[a-z][\w-]*)", parser.format_usage()) if parser else []


def arguments(magic: Callable[..., object], line: str, *, unquote: bool = False) -> Namespace:
    """Parse a magic's line; a UserError names the word that is wrong, and the problem.

    ``unquote``: remove quotation marks as a shell does; by default they are part of the words.
    """
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]
    parser.allow_abbrev = False  # --ranks is not --ranks-per-host
    name = magic.__name__
    try:
        parsed, unknown = parser.parse_known_args(arg_split(line, posix=unquote))
    except UsageError as error:
        raise UserError(f"{error}; %{name}? explains it.") from None
    except ValueError as error:  # an unclosed quotation
        raise UserError(f"{error} in {line.strip()!r}.") from None
    if unknown:
        word, known = unknown[0].partition("=")[0], flags(magic)
        if not word.startswith("-"):
            raise UserError(
                f"{name} has no use for {word}: options begin with dashes, and several values of "
                f"one are joined by commas, without spaces; %{name}? explains it."
            )
        if word in ("--attach", "--detach"):
            raise UserError(
                f"{name} has no option {word}: ranks end with their kernel; a script of "
                "%ddp_export goes on under torchrun."
            )
        near = closest(word, known)
        advice = f"did you mean {near}?" if near else f"its options are: {', '.join(known)}."
        raise UserError(f"{name} has no option {word}; {advice}")
    return parsed


def no_arguments(magic: str, line: str) -> None:
    """Raise a UserError if there are arguments."""
    if line.strip():
        raise UserError(f"{magic} takes no arguments, but was given {line.strip()!r}.")


VALUES: dict[str, tuple[str, ...]] = {}
"""What Tab offers after an option that has a declaration."""


class options(ArgDecorator):  # noqa: N801  as IPython's own
    """Adds options of a spec to a magic, grouped under their headings."""

    def __init__(self, chosen: Mapping[str, Option]) -> None:
        self._options = chosen.values()

    def add_to_parser(self, parser: argparse.ArgumentParser, group: object) -> None:
        """Add the options."""
        headings: dict[str, Any] = {"": parser}
        for option in self._options:
            if option.group not in headings:
                headings[option.group] = parser.add_argument_group(option.group)
            headings[option.group].add_argument(option.flag, **_settings(option))
            VALUES[option.flag] = option.offers or option.choices


def catalogue_text() -> str:
    """Return the strategies and tasks with their options, for the end of a help text."""
    lines: list[str] = []
    for heading, entries in (("strategies", STRATEGIES), ("tasks", TASKS)):
        lines += ["", f"{heading}:"]
        for name, entry in entries.items():
            lines.append(f"  {name:<17}  {entry.about}")
            for key, option in entry.options.items():
                given = option.example if option.default is None else option.default
                values = "|".join(option.values) or given
                lines.append(f"    {name}:{key}={values}  {option.about}")
    return "\n".join(lines[1:])


def _settings(option: Option) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for an option."""
    about, default = option.meaning.replace("%", "%%"), option.default
    settings: dict[str, Any] = {"dest": option.keyword, "default": argparse.SUPPRESS}
    if option.value_kind is bool:
        return settings | {"action": f"store_{str(not default).lower()}", "help": about}
    if default not in (None, (), "", CELL_TASK) and "by default" not in about:
        shown = default if isinstance(default, tuple) else (default,)
        about = f"{about} [{','.join(str(each).removesuffix('.0') for each in shown)}]"
    if option.most_values > 1:
        settings["action"] = "append"
    return settings | {"metavar": option.example, "help": about}
