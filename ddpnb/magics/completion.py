"""Completes (Tab) and describes (Shift+Tab) names in magics and in cells for ranks.

A rank completes and describes its variables.  If the rank is busy or does not answer at once,
the notebook completes with its own variables, as in all other cells.  Runs in the kernel.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from IPython.core.interactiveshell import InteractiveShell

from ddpnb.course.exercises import HINTS
from ddpnb.declaration import MAGICS, Magic
from ddpnb.hosts.launchers import profiles
from ddpnb.magics.arguments import flags
from ddpnb.protocol.calls import calls
from ddpnb.protocol.catalogue import STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import SHOWN, TRACE
from ddpnb.session.session import this_session

RANK_CELL = re.compile(
    r"\s*%%(?:rank[ \t]+(\d*)|ddp(?=[ \t]|$)(?:.*--ranks[ =](\d+))?)", re.MULTILINE
)
"""Matches the magic of a cell that runs on ranks, and the first rank that the magic names."""

PULL = re.compile(
    r"[ \t]*(?:[^\W\d]\w*[ \t]*=[ \t]*)?%ddp_(?:pull|check|inspect|samples)[ \t]+"
    r"((?:.*[ \t])?(?!-)\S*)"
)
"""Matches a magic's line that names variables of the ranks, unless the last word is an option."""

PULL_OPTION = re.compile(r"--(?:ranks[ =]+(\d*)\S*|as[ =]+\S*)[ \t]+")

BLANK_LINES = re.compile(r"(?:[ \t]*\n)+")


@final
class Completion:
    """Completes the lines of magics, and asks a rank for completions in cells that run on ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)

    def install(self) -> None:
        """Let ``complete`` answer Tab and ``inspect`` answer Shift+Tab in the kernel."""
        if self._kernel is not None:
            self._kernel.do_complete, self._kernel.do_inspect = self.complete, self.inspect

    def remove(self) -> None:
        """Let the kernel answer Tab and Shift+Tab again; may be called twice."""
        if self._kernel is not None:
            vars(self._kernel).pop("do_complete", None)
            vars(self._kernel).pop("do_inspect", None)

    def complete(self, code: str, cursor_pos: int | None) -> Any:
        """Answer a ``complete_request``, as ``IPythonKernel.do_complete`` does."""
        end = len(code) if cursor_pos is None else cursor_pos
        fragment, found = "", list[tuple[str, str]]()
        if (asked := self._asked(code, end)) is not None:
            request = calls.complete(asked.source, asked.offset)
            fragment, found = this_session().answer_now(request, asked.rank) or ("", [])
        if not found:
            *words, fragment = code[:end].rpartition("\n")[2].split(" ")
            while words and not words[0].startswith("%"):  # skips "result =" in front of a magic
                words.pop(0)
            follow = following(words, self._shell.user_ns, fragment) if words else ()
            found = [(text, kind) for text, kind in follow if text.startswith(fragment)]
        if not found:
            return type(self._kernel).do_complete(self._kernel, code, cursor_pos)
        place = {"start": end - len(fragment), "end": end}
        return {
            "status": "ok",
            "matches": [text for text, _ in found],
            "cursor_start": place["start"],
            "cursor_end": end,
            "metadata": {
                "_jupyter_types_experimental": [{"text": t, "type": k, **place} for t, k in found]
            },
        }

    def inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Sequence[str] = ()
    ) -> Any:
        """Answer an ``inspect_request``, as ``IPythonKernel.do_inspect`` does."""
        asked = self._asked(code, cursor_pos)
        if asked is not None:
            request = calls.describe(asked.source, asked.offset, detail_level)
            if bundle := this_session().answer_now(request, asked.rank):
                form = "application/json" if "google.colab" in sys.modules else "text/plain"
                data = {form: bundle[form]}  # Colab's own kernel answers with JSON
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
        usual = type(self._kernel).do_inspect
        return usual(self._kernel, code, cursor_pos, detail_level, omit_sections)

    def _asked(self, source: str, offset: int) -> "Place | None":
        """Return the cursor's place in code for ranks, or None if the code is not for ranks."""
        magic = RANK_CELL.match(source)
        pulled = PULL.fullmatch(source[:offset].rpartition("\n")[2])
        if pulled is not None and magic is None:
            expression = PULL_OPTION.sub("", pulled[1])
            named = next((match[1] for match in PULL_OPTION.finditer(pulled[1]) if match[1]), "")
            return Place(expression, len(expression), int(named) if named else None)
        if magic is None:
            return None
        named = magic[1] or magic[2]
        begin = magic.end() + len(source[magic.end() :].partition("\n")[0])
        if blank := BLANK_LINES.match(source, begin):  # IPython completes nothing after these
            begin = blank.end()
        if offset <= begin:  # in the line of the magic
            return None
        return Place(source[begin:], offset - begin, int(named) if named else None)


class Place(NamedTuple):
    """The place of the cursor in the source of a cell that runs on ranks."""

    source: str
    offset: int
    rank: int | None
    """The first rank that the cell names.  None if the cell does not name a rank."""


# -- lines of the magics -------------------------------------------------------------------


def following(
    words: Sequence[str], namespace: Mapping[str, object], prefix: str
) -> Iterator[tuple[str, str]]:
    """Yield completions and their kinds for a line of a magic: first names, then options.

    ``words`` are the complete words of the line, ``prefix`` is the beginning of the next word, and
    ``namespace`` has the notebook's variables.
    """
    declared = MAGICS.get(words[0].lstrip("%"))
    if declared is None:
        return
    if declared.name == "ddp_run" and any(word.strip("'\"").endswith(".py") for word in words):
        return  # the script's arguments follow
    found: Offered | None = ("", ())
    with contextlib.suppress(UserError):  # the store cannot be read, or does not have the run
        found = values(declared, words[-1], prefix)
        kind, texts = found or names(declared.name, namespace, prefix)
        yield from ((text, kind) for text in texts)
    if found is None:
        yield from ((text, "option") for text in flags(declared))


Offered = tuple[str, Iterable[str]]
"""A pair: the kind that a notebook shows beside each completion, and the completions."""


def values(declared: Magic, flag: str, prefix: str) -> Offered | None:
    """Return the possible values of a magic's option; None if they are unknown."""
    known = {each.flag: each.offers or each.choices for each in declared.arguments.values()}
    match flag:
        case "--profile":
            return "profile", profiles()
        case "--task":
            return "task", choices(TASKS, prefix)
        case "--run":
            return "run", this_session().names()
        case "--strategies":
            before = prefix[: prefix.rfind(",") + 1]
            return "strategy", (f"{before}{each}" for each in known[flag])
    return ("value", known[flag]) if known.get(flag) else None


def choices(entries: Mapping[str, Entry], prefix: str) -> Iterable[str]:
    """Return the names in ``entries``; after ``name:``, return options and values of ``name``."""
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


def names(magic: str, namespace: Mapping[str, object], prefix: str) -> Offered:
    """Return the names that can follow a magic, such as strategies, runs or variables."""
    match magic:
        case "ddp_compare":
            return "strategy", choices(STRATEGIES, prefix)
        case "ddp_source":
            return "strategy", STRATEGIES
        case "ddp_show":
            return "collective", (*SHOWN, TRACE)
        case "ddp_exercise":
            return "exercise", HINTS
        case "ddp_push":
            return "variable", sorted(name for name in namespace if not name.startswith("_"))
        case "ddp_plot" | "ddp_runs" | "ddp_export" | "ddp_samples":
            return "run", this_session().names()
    return "", ()
