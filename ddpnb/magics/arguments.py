"""The arguments of the magics: how they are declared, parsed, explained and completed (kernel)."""

import argparse
import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from IPython.core import magic_arguments as ipython
from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics
from IPython.core.magic_arguments import ArgDecorator
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from ddpnb.course.exercises import HINTS
from ddpnb.hosts.launchers import profiles
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.options import Option
from ddpnb.protocol.trace import SHOWN, TRACE
from ddpnb.session.session import this_session

Magic = TypeVar("Magic", bound=Callable[..., Any])

_ENDS = "ranks end with their kernel; a script of %ddp_export goes on under torchrun."
_EXPORT = "%ddp_export writes a script that saves checkpoints and goes on from them."
GONE = {
    "--attach": _ENDS,
    "--detach": _ENDS,
    "--transport": "async takes shared memory on one host and gloo across hosts by itself.",
    "--resume": f"a comparison is trained in one go; {_EXPORT}",
    "--save-every": f"--save keeps the trained weights; {_EXPORT}",
    "--sbatch": "docs/hosts.md has the lines that start a script in a job of Slurm.",
    "--slurm": "sbatch reads SBATCH_PARTITION, SBATCH_TIMELIMIT and others from the environment.",
    "--strategy": "a script trains with DDP, whatever was compared.",
}
"""Options of earlier versions, and what to do in their place."""


def magic_arguments() -> Callable[[Magic], Magic]:
    """Give a magic its parser, as IPython's decorator does; its help begins with the usage."""

    def decorate(magic: Magic) -> Magic:
        decorated: Magic = ipython.magic_arguments()(magic)
        help_text = decorated.__doc__ or ""
        decorated.__doc__ = help_text.removeprefix("::").lstrip("\n")  # markup for Sphinx
        return decorated

    return decorate


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
        if word in GONE:
            raise UserError(f"{name} has no option {word} any more: {GONE[word]}")
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


# -- completion ----------------------------------------------------------------------------


def complete_magics(shell: InteractiveShell, magics: Sequence[Magics]) -> None:
    """Register the completion of the magics' lines with the shell."""

    @context_matcher()  # type: ignore[untyped-decorator]
    def ddpnb_matcher(context: CompletionContext) -> SimpleMatcherResult:
        *words, last = context.line_with_cursor[: context.cursor_position].split(" ")
        while words and not words[0].startswith("%"):  # as in: result = %ddp_compare
            words.pop(0)
        candidates = following(magics, words, shell.user_ns, last) if words else ()
        found = [each for each in candidates if each.text.startswith(last)]
        return {
            "completions": found,
            "suppress": bool(found),
            "matched_fragment": last,
            "ordered": True,
        }

    matchers = shell.Completer.custom_matchers
    matchers[:] = [m for m in matchers if m.__name__ != ddpnb_matcher.__name__]
    matchers.append(ddpnb_matcher)


def following(
    magics: Sequence[object], words: list[str], namespace: dict[str, object], prefix: str
) -> Iterator[SimpleCompletion]:
    """Yield what may follow in a line, names before options; nothing in lines of other magics.

    ``words`` are the line's complete words so far, ``prefix`` the beginning of the next one, and
    ``namespace`` the notebook's variables.
    """
    name = words[0].lstrip("%")
    if not name.startswith(("ddp", "rank")):
        return
    if name == "ddp_run" and any(word.endswith(".py") for word in words):
        return  # the script's own arguments
    magic = next((getattr(each, name) for each in magics if hasattr(each, name)), None)
    found: Offered | None = ("", ())
    with contextlib.suppress(UserError):  # the store cannot be read, or has no such run
        found = values(words, prefix)
        kind, texts = found or names(name, namespace, prefix)
        yield from (SimpleCompletion(text, type=kind) for text in texts)
    if found is None:
        yield from (SimpleCompletion(text, type="option") for text in flags(magic))


Offered = tuple[str, Iterable[str]]
"""Completions, after the kind that a notebook shows beside them."""


def values(words: Sequence[str], prefix: str) -> Offered | None:
    """Return the values of an option at the end of a line; None where there are none to list."""
    match words[-1]:
        case "--profile":
            return "profile", profiles()
        case "--task":
            return "task", choices(TASKS, prefix)
        case "--run":
            return "run", this_session().names()
        case "--strategies":
            before = prefix[: prefix.rfind(",") + 1]
            return "strategy", (f"{before}{each}" for each in VALUES["--strategies"])
        case option:
            return ("value", VALUES[option]) if VALUES.get(option) else None


def choices(entries: Mapping[str, Entry], prefix: str) -> Iterable[str]:
    """Return the names in a table, or after a name and a colon its options and their values."""
    name, colon, options_text = prefix.partition(":")
    if not colon or name not in entries:
        return entries
    before, comma, last = options_text.rpartition(",")
    key, equals, _ = last.partition("=")
    stem = f"{name}:{before}{comma}"
    table = entries[name].options
    if not equals:
        return [f"{stem}{option}=" for option in table]
    return [f"{stem}{key}={value}" for value in table[key].values] if key in table else ()


def scripts(prefix: str) -> Iterator[str]:
    """Yield the scripts that a path may lead to, and the folders, as they are written."""
    head = prefix[: prefix.rfind("/") + 1]
    with contextlib.suppress(OSError):
        for path in sorted(Path(head or ".").expanduser().iterdir()):
            if path.suffix == ".py" or (path.is_dir() and not path.name.startswith((".", "__"))):
                yield f"{head}{path.name}{'/' if path.is_dir() else ''}"


def names(magic: str, namespace: Mapping[str, object], prefix: str) -> Offered:
    """Return the names that a magic takes: strategies, runs, variables."""
    match magic:
        case "ddp_compare":
            return "strategy", choices(STRATEGIES, prefix)
        case "ddp_source":
            return "strategy", STRATEGIES
        case "ddp_show":
            return "collective", (*SHOWN, TRACE)
        case "ddp_exercise":
            return "exercise", HINTS
        case "ddp_auto":
            return "value", ("on", "off")
        case "ddp_push":
            return "variable", sorted(name for name in namespace if not name.startswith("_"))
        case "ddp_inspect":
            return "variable", this_session().known_names()
        case "ddp_run":
            return "path", scripts(prefix)
        case "ddp_plot" | "ddp_runs" | "ddp_export" | "ddp_samples":
            return "run", this_session().names()
    return "", ()
