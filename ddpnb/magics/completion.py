"""What can follow in a magic's line?  Tab completion.  (Notebook side.)"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from ddpnb.cluster.detach import detached
from ddpnb.cluster.placement import BACKENDS, DEVICES
from ddpnb.magics.arguments import options
from ddpnb.protocol.catalogue import STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.training_options import training_options
from ddpnb.session.session import this_session

VALUES = {"--device": DEVICES, "--backend": BACKENDS} | {
    option.flag: option.choices for _, option in training_options() if option.choices
}
"""What may follow an option."""


def complete_magics(shell: InteractiveShell, magics: Magics) -> None:
    """Have the shell complete the lines of ddpnb's magics.

    Args:
        shell: the notebook's IPython.
        magics: whose options are completed.
    """

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
    magics: Magics, words: list[str], namespace: dict[str, object], begun: str
) -> Iterator[SimpleCompletion]:
    """Yield what may follow the words of a line so far, names before options.

    Nothing where the line is not ours.

    Args:
        magics: whose options are completed.
        words: the whole words before.
        namespace: the notebook's variables.
        begun: the beginning of the next word.
    """
    name = words[0].lstrip("%")
    if not name.startswith(("ddp", "rank")):
        return
    match words[-1]:
        case "--attach":
            yield from of_kind("cluster", [saved.name for saved in detached()])
        case "--task":
            yield from of_kind("task", choices(TASKS, begun))
        case "--resume":
            yield from names("ddp_plot", namespace, begun)
        case option if option in VALUES:
            yield from of_kind("value", VALUES[option])
        case _:
            yield from names(name, namespace, begun)
            yield from of_kind("option", options(getattr(magics, name, None)))


def of_kind(kind: str, texts: Iterable[str]) -> Iterator[SimpleCompletion]:
    """Yield completions that a notebook shows with a word for what they are."""
    return (SimpleCompletion(text, type=kind) for text in texts)


def choices(entries: Mapping[str, Entry], begun: str) -> Iterable[str]:
    """Return the names of a table; behind a name and its colon, what can be chosen about it."""
    name, colon, given = begun.partition(":")
    if not colon or name not in entries:
        return entries
    before, comma, last = given.rpartition(",")
    key, equals, _ = last.partition("=")
    stem = f"{name}:{before}{comma}"
    table = entries[name].options
    if not equals:
        return [f"{stem}{option}=" for option in table]
    return [f"{stem}{key}={value}" for value in table[key].values] if key in table else ()


def names(magic: str, namespace: dict[str, object], begun: str) -> Iterator[SimpleCompletion]:
    """Yield the names that a magic takes: strategies, runs, variables."""
    match magic:
        case "ddp_compare":
            yield from of_kind("strategy", choices(STRATEGIES, begun))
        case "ddp_auto":
            yield from of_kind("value", ("on", "off"))
        case "ddp_push":
            here = [name for name in namespace if not name.startswith("_")]
            yield from of_kind("variable", sorted(here))
        case "ddp_plot" | "ddp_runs" | "ddp_export":
            with contextlib.suppress(UserError):  # a store that cannot be read completes nothing
                yield from of_kind("run", this_session().names())
