"""Makes IPython's magics from their declarations, and parses lines.  Runs in the kernel."""

import functools
import re
import shlex
from argparse import REMAINDER, SUPPRESS, ArgumentParser
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from ddpnb.declaration import MAGICS, Magic
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option

STRING = r"""("{3}|'{3}|"|')(?:\\.|(?!\1).)*\1"""
"""Matches a string of Python."""
WORD = re.compile(rf"""(?:{STRING}|[^\s"'])+""", re.DOTALL)
QUOTED = re.compile(rf"(?:--[a-z][\w-]*=)?{STRING}", re.DOTALL)
OPTION = re.compile(
    rf"""{STRING}|(?<!\S)(?P<option>--[a-z][\w-]*(?:=|\s+|$)(?:"[^"]*"|'[^']*'|\S*))""", re.DOTALL
)
"""Matches a string, or an option with its value."""
EXAMPLE = re.compile("``(%[^`]+)``")
"""Matches a magic's line in the magic's help."""


def function_of(declared: Magic) -> Callable[..., Any]:
    """Return the function that IPython calls for a magic.  Its docstring is the magic's help."""

    @functools.wraps(declared.function)  # so that %magic?? shows the function's source
    def call(line: str, cell: str = "") -> Any:
        words, choices = arguments(declared.name, line, cell)
        result = declared.function(*words, **choices)
        return result if declared.show is None else declared.show(result)

    call.__doc__ = parser_of(declared.name).format_help()
    return call


def arguments(name: str, line: str, cell: str = "") -> tuple[list[str], dict[str, Any]]:
    """Return the arguments for a magic's function: those for its ``*`` parameter, and the others.

    If the line is wrong, a UserError names the first wrong word and the problem.  The magic's line
    is a comment above the cell, so that line numbers stay correct.
    """
    declared = MAGICS[name]
    try:
        words = SPLITTERS[declared.words](line)
        parsed, unknown = parser_of(name).parse_known_args(words)
    except UsageError as error:
        example = EXAMPLE.search(declared.help)
        advice = f"Write for example {example[1]}. " if example else ""
        raise UserError(f"{error}. {advice}Type %{name}? for help.") from None
    except ValueError as error:  # a quotation mark is not closed, or a backslash ends the line
        raise UserError(
            f"{error} in %{name} {line.strip()}. Close each quotation mark, or write a backslash "
            "before it."
        ) from None
    if unknown:
        _reject(declared, unknown[0].partition("=")[0])
    choices, several = vars(parsed), list[str]()
    for key, parameter in declared.parameters.items():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            several = choices.pop(key, [])
        elif key == "source":
            own = cell if cell.startswith("%%") else f"# %%{name} {line}\n{cell}"
            choices["source"] = own if cell.strip() else ""
        elif key in choices and (option := declared.arguments[key]).kind is int:
            choices[key] = option.read(option.flag, choices[key])
    return several, choices


def _reject(declared: Magic, word: str) -> NoReturn:
    name, known = declared.name, flags(declared)
    if not declared.arguments:
        raise UserError(f"%{name} takes no arguments. Remove {word!r}.")
    if not word.startswith("-"):
        raise UserError(
            f"{name}: unexpected argument {word}. Options start with --. Separate several values "
            f"with commas, without spaces. Type %{name}? for help."
        )
    near = closest(word, known)
    options = f"the options are {', '.join(known)}." if known else "remove it."
    advice = f"did you mean {near}?" if near else options
    raise UserError(f"{name} has no option {word}; {advice}")


def flags(declared: Magic) -> list[str]:
    """Return the flags of a magic's options, such as ``--ranks``."""
    return [each.flag for each in declared.arguments.values() if each.flag.startswith("-")]


# -- the words of a line -------------------------------------------------------------------


def _python_words(line: str) -> list[str]:
    """Split a line; quotation marks inside a word stay, as in ``d["a"]``.

    Quotation marks around a whole word or a whole value are removed.
    """
    if WORD.sub("", line).strip():
        raise ValueError("No closing quotation")
    words = [each[0] for each in WORD.finditer(line)]
    return [shlex.split(word)[0] if QUOTED.fullmatch(word) else word for word in words]


def _expression_words(line: str) -> list[str]:
    """Return a line's options, and everything else as one word."""
    options = [each["option"] for each in OPTION.finditer(line) if each["option"]]
    expression = OPTION.sub(lambda each: "" if each["option"] else each[0], line).strip()
    return [*shlex.split(" ".join(options)), *(("--", expression) if expression else ())]


SPLITTERS: Mapping[str, Callable[[str], list[str]]] = {
    "shell": shlex.split,
    "python": _python_words,
    "expression": _expression_words,
}
"""The function for each value of ``Magic.words``."""


# -- the parser and the help ---------------------------------------------------------------


@functools.cache
def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a magic's arguments, with options grouped under headings."""
    declared = MAGICS[name]
    epilog = catalogue_text() if name == "ddp_compare" else ""
    prog = f"%{name}" if declared.kind == "cell" else name
    parser = MagicArgumentParser(prog, description=declared.help, epilog=epilog)
    parser.allow_abbrev = False  # --ranks is not --ranks-per-host
    headings: dict[str, Any] = {"": parser}
    for key, each in declared.arguments.items():
        if each.group not in headings:
            headings[each.group] = parser.add_argument_group(each.group)
        named = {"dest": key} if each.flag.startswith("-") else {}
        settings = _settings(each, declared.parameters.get(key))
        headings[each.group].add_argument(each.flag, **named, **settings)
    return parser


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


def _settings(option: Option, parameter: Parameter | None) -> dict[str, Any]:
    """Return the arguments of ``add_argument``.  ``parameter`` is None for options of a spec."""
    about, default = option.meaning.replace("%", "%%"), option.default
    settings: dict[str, Any] = {"default": SUPPRESS, "help": about}
    if option.value_kind is bool:
        return settings | {"action": f"store_{str(not default).lower()}"}
    if not option.flag.startswith("-"):
        if parameter is not None and parameter.kind is Parameter.VAR_POSITIONAL:
            return settings | {"nargs": "*"}
        if default is Parameter.empty:
            return settings
        return settings | {"nargs": REMAINDER if default == () else "?"}
    if default not in (None, (), "", CELL_TASK) and "by default" not in about:
        shown = default if isinstance(default, tuple) else (default,)
        settings["help"] += f" [{','.join(str(each).removesuffix('.0') for each in shown)}]"
    if option.most_values > 1:
        settings["action"] = "append"
    return settings | {"metavar": option.example}
