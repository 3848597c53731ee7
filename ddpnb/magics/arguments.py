"""The arguments of the magics: how they are declared, parsed, explained and completed (kernel)."""

import argparse
import contextlib
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

from ddpnb.cluster.placement import BACKENDS, DEVICES
from ddpnb.compat.python_internals import options_of
from ddpnb.hosts.launchers import profiles
from ddpnb.hosts.spec import ENGINES
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS, Entry
from ddpnb.protocol.costs import ALL_REDUCES, BEST
from ddpnb.protocol.devices import CARDS, MODELS
from ddpnb.protocol.errors import UserError, closest
from ddpnb.protocol.notation import LINKS
from ddpnb.protocol.options import Option
from ddpnb.protocol.trace import COLLECTIVES, REDUCTIONS, TRACE
from ddpnb.protocol.training_options import training_options
from ddpnb.reports.style import ACROSS, PANELS
from ddpnb.scaling.model import FORMULAS
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


def options(magic: object) -> list[str]:
    """Return the option strings of a magic's parser."""
    parser: argparse.ArgumentParser | None = getattr(magic, "parser", None)
    if parser is None:
        return []
    return options_of(parser)


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
        word, known = unknown[0].partition("=")[0], options(magic)
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
                given = option.example if option.default is None else option.default
                values = "|".join(option.values) or given
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


# -- completion ----------------------------------------------------------------------------

VALUES = {
    "--op": REDUCTIONS,
    "--device": DEVICES,
    "--backend": BACKENDS,
    "--engines": ENGINES,
    "--link": tuple(LINKS),
    "--inside": tuple(LINKS),
    "--device-link": tuple(LINKS),
    "--devices": tuple(f"8x{card}" for card in CARDS),
    "--as": tuple(MODELS),
    "--x": ACROSS,
    "--panels": PANELS,
} | {option.flag: option.choices for _, option in training_options() if option.choices}
"""The values that an option takes."""


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
    match words[-1]:
        case "--profile":
            yield from of_kind("profile", profiles())
        case "--task":
            yield from of_kind("task", choices(TASKS, prefix))
        case "--run":
            yield from names("ddp_plot", namespace, prefix)
        case _ if name == "ddp_run" and any(word.endswith(".py") for word in words):
            return  # the script's own arguments
        case "--y" if name == "ddp_plot":
            with contextlib.suppress(UserError):  # none of the words is a run
                yield from of_kind("number", this_session().measured(words[1:]))
        case "--algorithm":
            yield from of_kind("value", (*ALL_REDUCES, BEST))
        case "--strategies":
            before = prefix[: prefix.rfind(",") + 1]
            yield from of_kind("strategy", (f"{before}{each}" for each in FORMULAS))
        case option if option in VALUES:
            yield from of_kind("value", VALUES[option])
        case _:
            yield from names(name, namespace, prefix)
            found = next((getattr(each, name) for each in magics if hasattr(each, name)), None)
            yield from of_kind("option", options(found))


def of_kind(kind: str, texts: Iterable[str]) -> Iterator[SimpleCompletion]:
    """Yield completions with the kind that a notebook shows beside them."""
    return (SimpleCompletion(text, type=kind) for text in texts)


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


def names(magic: str, namespace: dict[str, object], prefix: str) -> Iterator[SimpleCompletion]:
    """Yield the names that a magic takes: strategies, runs, variables."""
    match magic:
        case "ddp_compare":
            yield from of_kind("strategy", choices(STRATEGIES, prefix))
        case "ddp_source":
            yield from of_kind("strategy", STRATEGIES)
        case "ddp_show":
            yield from of_kind("collective", (*COLLECTIVES, TRACE))
        case "ddp_auto":
            yield from of_kind("value", ("on", "off"))
        case "ddp_push":
            here = [name for name in namespace if not name.startswith("_")]
            yield from of_kind("variable", sorted(here))
        case "ddp_inspect":
            yield from of_kind("variable", this_session().known_names())
        case "ddp_run":
            yield from of_kind("path", scripts(prefix))
        case "ddp_plot" | "ddp_runs" | "ddp_export" | "ddp_samples":
            with contextlib.suppress(UserError):  # the store cannot be read
                yield from of_kind("run", this_session().names())
