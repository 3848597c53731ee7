"""Merges the output of several ranks into one sequence.  Runs in the kernel.

Each rank's output is a sequence of items: lines, displayed figures, values.  The items of each
rank keep their order.  If several ranks have the same next item, ddpnb shows the item once, with
a label that names these ranks.
"""

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

HOLD_SECONDS = 0.25
"""Seconds for which an item is held back, because other running ranks may print the same item.
On each rank, ipykernel sends printed text every 0.2 s."""

MAX_ROWS = 64
"""Maximum number of lines at the end of a stream that progress bars can still overwrite."""

MOVES = re.compile(r"(\n|\x1b\[\d*[AB])")
"""A line end, or an escape sequence that moves the cursor up or down (tqdm's ``position=1``)."""
ERASES = re.compile(r"\x1b\[\d*[JK]")
"""An escape sequence that erases text.  ddpnb skips it, because new text replaces the old text."""
INCOMPLETE = re.compile(r"\x1b(\[\d*)?\Z")
"""The beginning of an escape sequence that is not complete yet."""
REDRAWS = re.compile(r"\x1b\[\d*[ABJK]")
"""An escape sequence that moves the cursor or erases text.  Sequences for colours do not match."""


Item = tuple[str, str]
"""The kind and the text of a piece of output that is shown as a whole.
The kind is ``"stdout"``, ``"stderr"``, ``"bar"``, ``"display"``, ``"update"`` or ``"value"``.  The
text is a line without its line end, or the MIME bundle of a display as JSON with sorted keys."""

Run = tuple[list[int], list[Item]]
"""A list of ranks, and a list of successive items that these ranks have in common."""


class OutputMerger:
    """Merges the output of several ranks.

    Args:
        ranks: the ranks that run the cell.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._outputs = {rank: RankOutput() for rank in ranks}

    @property
    def running(self) -> set[int]:
        """The ranks that are still running the cell."""
        return {rank for rank, output in self._outputs.items() if output.is_running}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Add text that a rank wrote to a stream, ``"stdout"`` or ``"stderr"``."""
        output = self._outputs[rank]
        if stream not in output.screens:
            output.screens[stream] = Screen(stream)
        output.add(output.screens[stream].write(text))

    def add(self, rank: int, items: Iterable[Item]) -> None:
        """Add displays of a rank, or the value that the cell returned on this rank."""
        self._outputs[rank].add(items)

    def put_back(self, rank: int, items: Sequence[Item]) -> None:
        """Put items before a rank's other items, to show them without waiting for other ranks."""
        self._outputs[rank].items.extendleft(reversed(items))
        self._outputs[rank].since = 0.0

    def clear(self, rank: int) -> None:
        """Drop the part of a rank's output that ``take`` has not returned yet."""
        self._outputs[rank] = RankOutput(is_running=self._outputs[rank].is_running)

    def finish(self, rank: int) -> None:
        """Mark a rank as finished, and complete its last lines."""
        output = self._outputs[rank]
        output.is_running = False
        for screen in output.screens.values():
            output.add(screen.rest())
        output.screens.clear()

    def unfinished(self) -> dict[str, list[int]]:
        """Return the current text of each unfinished line (progress bar), and its ranks."""
        lines: dict[str, list[int]] = {}
        for rank, output in self._outputs.items():
            for screen in output.screens.values():
                for line in screen.lines():
                    if rank not in lines.setdefault(line, []):
                        lines[line].append(rank)
        return lines

    def take(self, *, at_once: bool = False) -> list[Run]:
        """Remove and return the items that can be shown now, grouped by their ranks.

        If ``at_once``, return every item, even if other ranks may still write the same item.
        """
        runs: list[Run] = []
        ahead: dict[int, Counter[Item]] = {}
        while ready := self._ready(at_once=at_once):
            first, *rest = (output.items for output in ready.values())
            if all(items == first for items in rest):  # the fastest way to compare many ranks
                runs.append((list(ready), list(first)))
                for output in ready.values():
                    output.items = deque()
                ahead.clear()
                continue
            ahead = ahead or {rank: Counter(output.items) for rank, output in ready.items()}
            while all(output.items for output in ready.values()):
                heads = {rank: output.items[0] for rank, output in ready.items()}
                item = choose(heads, ahead)
                ranks = [rank for rank, head in heads.items() if head == item]
                for rank in ranks:
                    ready[rank].items.popleft()
                    ahead[rank][item] -= 1
                if runs and runs[-1][0] == ranks:
                    runs[-1][1].append(item)
                else:
                    runs.append((ranks, [item]))
        return runs

    def _ready(self, *, at_once: bool) -> "dict[int, RankOutput]":
        """Return outputs that have items to show, or ``{}`` if other ranks may add equal items."""
        ready = {rank: output for rank, output in self._outputs.items() if output.items}
        if len(ready) == len(self._outputs) or not ready or at_once:
            return ready
        others_run = any(o.is_running and not o.items for o in self._outputs.values())
        oldest = min(output.since for output in ready.values())
        is_fresh = time.monotonic() - oldest < HOLD_SECONDS
        return {} if others_run and is_fresh else ready


def choose(heads: Mapping[int, Item], ahead: Mapping[int, Counter[Item]]) -> Item:
    """Choose which of the ranks' next items is shown next, and return this item.

    If possible, no other rank has this item among its later items, so equal items stay together.
    """
    for item in heads.values():
        if all(head == item or not ahead[rank][item] for rank, head in heads.items()):
            return item
    return next(iter(heads.values()))


@dataclass(slots=True)
class RankOutput:
    """The output of one rank that is not shown yet."""

    items: deque[Item] = field(default_factory=deque)
    screens: "dict[str, Screen]" = field(default_factory=dict)
    """The last lines of each stream, by the stream's name."""
    since: float = 0.0
    """Arrival time of the oldest item in ``items``, in seconds of the monotonic clock."""
    is_running: bool = True

    def add(self, items: Iterable[Item]) -> None:
        """Append items that the rank has written."""
        if not self.items:
            self.since = time.monotonic()
        self.items.extend(items)


class Screen:
    """The last lines of a stream as a terminal shows them.  Progress bars can overwrite the lines.

    Args:
        stream: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._rows = [""]
        self._row = 0
        """Index of the line to which the next text is added."""
        self._has_moved = False
        self._incomplete = ""

    def write(self, text: str) -> list[Item]:
        """Add text, and return the lines that are finished."""
        text, self._incomplete = self._incomplete + text, ""
        if found := INCOMPLETE.search(text):
            text, self._incomplete = text[: found.start()], found[0]
        if len(self._rows) == 1 and not redraws(text) and "\r" not in self._rows[0]:
            *lines, self._rows[0] = (self._rows[0] + text).split("\n")
            return list(zip(repeat(self._stream), lines, strict=False))
        for part in MOVES.split(ERASES.sub("", text)):
            if part == "\n":
                self._go_to(self._row + 1)
            elif MOVES.fullmatch(part):
                self._has_moved = True
                distance = int(part[2:-1] or 1)
                self._go_to(self._row + (-distance if part.endswith("A") else distance))
            else:
                self._rows[self._row] = shortened(self._rows[self._row] + part)
        return self._finished()

    def rest(self) -> list[Item]:
        """Return the lines that are left when the stream ends."""
        rows = self._rows if self._rows[-1] else self._rows[:-1]
        return self._items(rows)

    def lines(self) -> list[str]:
        """Return the current text of the lines that are not finished yet."""
        return [line for row in self._rows if (line := visible(row)).strip()]

    def _go_to(self, row: int) -> None:
        self._row = max(0, row)
        if self._row < len(self._rows):
            self._rows[self._row] = f"\r{visible(self._rows[self._row])}\r"  # until replaced
        self._rows += [""] * (self._row + 1 - len(self._rows))

    def _finished(self) -> list[Item]:
        """Remove and return the lines that are final: all lines up to the last plain line."""
        above = enumerate(self._rows[: self._row], start=1)
        plain = [n for n, row in above if not is_bar(row) and (row or not self._has_moved)]
        count = max(plain[-1] if plain else 0, min(len(self._rows) - MAX_ROWS, self._row))
        finished, self._rows = self._rows[:count], self._rows[count:]
        self._row -= count
        return self._items(finished)

    def _items(self, rows: Sequence[str]) -> list[Item]:
        items = [("bar" if is_bar(row) else self._stream, visible(row)) for row in rows]
        return [(kind, text) for kind, text in items if kind != "bar" or text.strip()]


def redraws(text: str) -> bool:
    """Return True if the text is part of a progress bar, False if it is plain or coloured text."""
    return "\r" in text or ("\x1b" in text and REDRAWS.search(text) is not None)


def is_bar(row: str) -> bool:
    """Return True if carriage returns have replaced the text of a line."""
    return "\r" in row.rstrip("\r")


def visible(line: str) -> str:
    """Return the part of a line that is visible after its carriage returns."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def shortened(row: str) -> str:
    """Return the line of a progress bar without the parts that later text has replaced."""
    if not is_bar(row):
        return row
    return f"\r{visible(row)}" + "\r" * row.endswith("\r")
