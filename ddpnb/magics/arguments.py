"""Declares, parses and explains the arguments of the magics.  Runs in the kernel."""

import argparse
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import ArgDecorator

from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option


def flags(magic: object) -> list[str]:
    """Return the names of a magic's options with their dashes, such as ``--ranks``."""
    parser: argparse.ArgumentParser | None = getattr(magic, "parser", None)
    return re.findall(r"\[(--?[a-z][\w-]*)", parser.format_usage()) if parser else []


STRING = r"""("{3}|'{3}|"|')(?:\\.|(?!\1).)*\1"""
"""Matches a string of Python."""
WORD = re.compile(rf"""(?:{STRING}|[^\s"'])+""", re.DOTALL)
QUOTED = re.compile(rf"(?:--[a-z][\w-]*=)?{STRING}", re.DOTALL)
OPTION = re.compile(
    rf"""{STRING}|(?<!\S)(?P<option>--[a-z][\w-]*(?:=|\s+|$)(?:"[^"]*"|'[^']*'|\S*))""", re.DOTALL
)
"""Matches a string, or an option with its value."""


def arguments(magic: Callable[..., object], line: str, *, python: bool = False) -> Namespace:
    """Parse a magic's line; raise a UserError that names the first wrong word and the problem.

    The line is split as in a shell.  If ``python`` is true, quotation marks inside a word stay, as
    in ``d["a"]``.  Only quotation marks around a whole word or a whole value are removed.
    """
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]
    parser.allow_abbrev = False  # --ranks is not --ranks-per-host
    name = magic.__name__
    try:
        words = _python_words(line) if python else shlex.split(line)
        parsed, unknown = parser.parse_known_args(words)
    except UsageError as error:
        raise UserError(f"{error}. Type %{name}? for help.") from None
    except ValueError as error:  # a quotation mark is not closed, or a backslash ends the line
        raise UserError(
            f"{error} in %{name} {line.strip()}. Close each quotation mark, or write a backslash "
            "before it."
        ) from None
    if unknown:
        word, known = unknown[0].partition("=")[0], flags(magic)
        if not word.startswith("-"):
            raise UserError(
                f"{name}: unexpected argument {word}. Options start with --. Separate several "
                f"values with commas, without spaces. Type %{name}? for help."
            )
        if word in ("--attach", "--detach"):
            raise UserError(
                f"{name} has no option {word}: ranks always end when the notebook's kernel ends. "
                "To train without a notebook, write a script for torchrun with %ddp_export."
            )
        near = closest(word, known)
        options = f"the options are {', '.join(known)}." if known else "remove it."
        advice = f"did you mean {near}?" if near else options
        raise UserError(f"{name} has no option {word}; {advice}")
    return parsed


def with_expression(line: str) -> str:
    """Return a line in which everything except its options is one quoted word."""
    options = [each["option"] for each in OPTION.finditer(line) if each["option"]]
    expression = OPTION.sub(lambda each: "" if each["option"] else each[0], line).strip()
    return " ".join([*options, *(("--", shlex.quote(expression)) if expression else ())])


def _python_words(line: str) -> list[str]:
    if WORD.sub("", line).strip():
        raise ValueError("No closing quotation")
    words = [each[0] for each in WORD.finditer(line)]
    return [shlex.split(word)[0] if QUOTED.fullmatch(word) else word for word in words]


def no_arguments(magic: str, line: str) -> None:
    """Raise a UserError if a user gives arguments to a magic that takes no arguments."""
    if line.strip():
        raise UserError(f"{magic} takes no arguments. Remove {line.strip()!r}.")


VALUES: dict[str, tuple[str, ...]] = {}
"""The values that Tab offers after each option."""


class options(ArgDecorator):  # noqa: N801  lowercase, as IPython's decorators
    """A decorator that adds the options of a spec to a magic, grouped under headings."""

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
    """Return a help text that lists all strategies and tasks with their options."""
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
