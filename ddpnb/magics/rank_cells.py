"""Cells that run on the ranks: which of them do, and Tab and Shift+Tab in them (kernel).

A rank completes names.  Where it is busy, or does not answer at once, the notebook answers from
the names that the rank had after its last cell, and from its own variables.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.protocol import calls
from ddpnb.session.session import this_session

PRIORITY = 100
"""Before IPython's own matchers, which then need not look."""

CELL = re.compile(r"\s*%%(?:rank[ \t]+(\d*)|ddp(?=[ \t]|$)(?:.*--ranks[ =](\d+))?)", re.MULTILINE)
"""The magic of a cell that runs on ranks, and the first rank that it names."""

PULL = re.compile(r"[ \t]*(?:[^\W\d]\w*[ \t]*=[ \t]*)?%ddp_(?:pull|check|samples)[ \t]+(.*)")
"""A line whose names are of the ranks, up to a place in it."""

PULL_OPTION = re.compile(r"--(?:ranks[ =]+(\d*)\S*|as[ =]+\S*)[ \t]+")

BLANK_LINES = re.compile(r"(?:[ \t]*\n)+")

NOTEBOOK_MAGICS = re.compile(r"^%(%ddp|%rank|ddp_|load_ext|reload_ext|unload_ext)", re.MULTILINE)
"""A cell with one of these runs in the notebook."""

NAME = re.compile(r"(?<![\w.'\"])[^\W\d]\w*$")
"""The beginning of a variable's name, at the end of a text."""

LOCAL = re.compile(r"^%%local[ \t]*$")


class AutoCells:
    """Puts ``%%ddp`` before every cell while it is on, and always removes ``%%local``."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_on = False
        self._redirected = ""

    def switch(self, on: bool) -> None:
        """Switch it on or off; may be called twice."""
        self._is_on = on
        self._redirected = ""

    def install(self) -> None:
        """Pass every cell through ``redirect``."""
        self._shell.input_transformers_cleanup.append(self.redirect)

    def remove(self) -> None:
        """Leave cells as they are; may be called twice."""
        if self.redirect in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self.redirect)

    def redirect(self, lines: list[str]) -> list[str]:
        """Return the lines of a cell, with ``%%ddp`` before them if it should run on the ranks."""
        source = "".join(lines)
        if lines and LOCAL.match(lines[0].rstrip("\n")):
            return ["\n", *lines[1:]]  # so that line numbers stay those of the notebook
        if not self.redirects(source):
            return lines
        self._redirected = source.rstrip("\n")
        return ["%%ddp\n", *lines]

    def redirects(self, source: str) -> bool:
        """Return whether a cell runs on the ranks although it does not say so."""
        is_local = LOCAL.match(source.partition("\n")[0]) or NOTEBOOK_MAGICS.search(source)
        return self._is_on and bool(source.strip()) and not is_local

    def has_redirected(self, cell: str) -> bool:
        """Return whether ``redirect`` added the ``%%ddp`` line above this cell."""
        return bool(self._redirected) and cell.rstrip("\n") == self._redirected


@final
class RankNames:
    """Asks a rank for completions and descriptions in cells that run there.

    Args:
        shell: the notebook's IPython.
        redirects: returns whether a cell without a magic runs on the ranks.
    """

    def __init__(self, shell: InteractiveShell, redirects: Callable[[str], bool]) -> None:
        self._shell = shell
        self._redirects = redirects
        self._kernel: Any = getattr(shell, "kernel", None)

    def install(self) -> None:
        """Take part in completion, and in the kernel's answers to Shift+Tab."""
        self.remove()

        @context_matcher(priority=PRIORITY)  # type: ignore[untyped-decorator]
        def rank_matcher(context: CompletionContext) -> SimpleMatcherResult:
            return self.complete(context)

        self._shell.Completer.custom_matchers.append(rank_matcher)
        if self._kernel is not None:
            self._kernel.do_inspect = self.inspect

    def remove(self) -> None:
        """Leave both to IPython; may be called twice."""
        matchers = self._shell.Completer.custom_matchers
        matchers[:] = [each for each in matchers if getattr(each, "__name__", "") != "rank_matcher"]
        if self._kernel is not None:
            vars(self._kernel).pop("do_inspect", None)

    def complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """Return what a rank completes; nothing in cells of the notebook."""
        lines = context.full_text.split("\n")[: context.cursor_line]
        offset = sum(len(line) + 1 for line in lines) + context.cursor_position
        asked = self._asked(context.full_text, offset)
        answer = None
        if asked is not None:
            request = calls.complete(asked.source, asked.offset)
            answer = this_session().answer_now(request, asked.rank)
        fragment, found = answer or ("", [])
        if asked is not None and answer is None and (begun := NAME.search(asked.before)):
            fragment = begun[0]
            known = this_session().known_names(asked.rank)
            found = [(name, "") for name in known if name.startswith(fragment)]
        return {
            "completions": [SimpleCompletion(text, type=kind) for text, kind in found],
            "suppress": bool(found and answer),
            "matched_fragment": fragment,
            "ordered": True,
        }

    def inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Sequence[str] = ()
    ) -> Any:
        """Answer an ``inspect_request``, as ``IPythonKernel.do_inspect`` does."""
        asked = self._asked(code, cursor_pos)
        if asked is not None:
            request = calls.describe(asked.source, asked.offset, detail_level)
            if bundle := this_session().answer_now(request, asked.rank):
                return {"status": "ok", "found": True, "data": bundle, "metadata": {}}
        usual = type(self._kernel).do_inspect
        return usual(self._kernel, code, cursor_pos, detail_level, omit_sections)

    def _asked(self, source: str, offset: int) -> "Place | None":
        """Return a place in a cell as the rank that it runs on sees it; None if it has none."""
        magic = CELL.match(source)
        pulled = PULL.fullmatch(source[:offset].rpartition("\n")[2])
        if pulled is not None and magic is None:
            expression = PULL_OPTION.sub("", pulled[1])
            named = next((match[1] for match in PULL_OPTION.finditer(pulled[1]) if match[1]), "")
            return Place(expression, len(expression), int(named) if named else None)
        if magic is None and not self._redirects(source):
            return None
        rank, begin = None, 0
        if magic is not None:
            named = magic[1] or magic[2]
            rank = int(named) if named else None
            begin = magic.end() + len(source[magic.end() :].partition("\n")[0])
        if blank := BLANK_LINES.match(source, begin):  # after them IPython completes nothing
            begin = blank.end()
        if offset <= begin and magic is not None:  # in the magic's own line
            return None
        return Place(source[begin:], max(0, offset - begin), rank)


class Place(NamedTuple):
    """A place in the source of a cell that runs on ranks."""

    source: str
    offset: int
    rank: int | None
    """The first rank that the cell names."""

    @property
    def before(self) -> str:
        """The source up to the place."""
        return self.source[: self.offset]
