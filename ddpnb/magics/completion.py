"""Tab completion of the magics' lines (kernel)."""

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

from ddpnb.cluster.placement import BACKENDS, DEVICES
from ddpnb.cluster.run_folder import detached
from ddpnb.magics.arguments import options
from ddpnb.protocol.catalogue import STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.training_options import training_options
from ddpnb.session.session import this_session

VALUES = {"--device": DEVICES, "--backend": BACKENDS} | {
    option.flag: option.choices for _, option in training_options() if option.choices
}
"""The values that an option takes."""


def complete_magics(shell: InteractiveShell, magics: Magics) -> None:
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
    magics: Magics, words: list[str], namespace: dict[str, object], prefix: str
) -> Iterator[SimpleCompletion]:
    """Yield what may follow in a line, names before options; nothing in lines of other magics.

    Args:
        magics: the magics, which know their options.
        words: the complete words of the line so far.
        namespace: the notebook's variables.
        prefix: the beginning of the next word.
    """
    name = words[0].lstrip("%")
    if not name.startswith(("ddp", "rank")):
        return
    match words[-1]:
        case "--attach":
            yield from of_kind("cluster", [record.name for record in detached()])
        case "--task":
            yield from of_kind("task", choices(TASKS, prefix))
        case "--resume":
            yield from names("ddp_plot", namespace, prefix)
        case option if option in VALUES:
            yield from of_kind("value", VALUES[option])
        case _:
            yield from names(name, namespace, prefix)
            yield from of_kind("option", options(getattr(magics, name, None)))


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


def names(magic: str, namespace: dict[str, object], prefix: str) -> Iterator[SimpleCompletion]:
    """Yield the names that a magic takes: strategies, runs, variables."""
    match magic:
        case "ddp_compare":
            yield from of_kind("strategy", choices(STRATEGIES, prefix))
        case "ddp_auto":
            yield from of_kind("value", ("on", "off"))
        case "ddp_push":
            here = [name for name in namespace if not name.startswith("_")]
            yield from of_kind("variable", sorted(here))
        case "ddp_plot" | "ddp_runs" | "ddp_export":
            with contextlib.suppress(UserError):  # the store cannot be read
                yield from of_kind("run", this_session().names())
