"""What can follow in a magic's line?  Tab completion.  (Notebook side.)"""

import argparse
from collections.abc import Iterable

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from ddpnb.catalogue import STRATEGIES, TASKS
from ddpnb.errors import UserError
from ddpnb.notebook.cluster.plan import BACKENDS, DEVICES
from ddpnb.notebook.session import this_session
from ddpnb.wire import AMP, LR_SCALING, TRANSPORTS

VALUES = {
    "--device": DEVICES,
    "--backend": BACKENDS,
    "--task": tuple(TASKS),
    "--amp": AMP,
    "--lr-scaling": LR_SCALING,
    "--transport": TRANSPORTS,
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
        candidates = following(magics, words, shell.user_ns) if words else ()
        found = [SimpleCompletion(text) for text in candidates if text.startswith(last)]
        return {"completions": found, "suppress": bool(found), "matched_fragment": last}

    matchers = shell.Completer.custom_matchers
    matchers[:] = [m for m in matchers if m.__name__ != ddpnb_matcher.__name__]
    matchers.append(ddpnb_matcher)


def following(magics: Magics, words: list[str], namespace: dict[str, object]) -> Iterable[str]:
    """Return what may follow the words of a line so far; nothing where it is not ours."""
    name = words[0].lstrip("%")
    if not name.startswith(("ddp", "rank")):
        return ()
    if words[-1] in VALUES:
        return VALUES[words[-1]]
    return [*options(getattr(magics, name, None)), *names(name, namespace)]


def options(magic: object) -> list[str]:
    """Return the options of a magic, as its parser knows them."""
    parser: argparse.ArgumentParser | None = getattr(magic, "parser", None)
    if parser is None:
        return []
    return [option for action in parser._actions for option in action.option_strings]


def names(magic: str, namespace: dict[str, object]) -> Iterable[str]:
    """Return the names that a magic takes: strategies, runs, variables."""
    match magic:
        case "ddp_compare":
            return STRATEGIES
        case "ddp_auto":
            return ("on", "off")
        case "ddp_push":
            return [name for name in namespace if not name.startswith("_")]
        case "ddp_plot" | "ddp_runs" | "ddp_export":
            try:
                return this_session().names()
            except UserError:  # a store that cannot be read completes nothing
                return ()
    return ()
