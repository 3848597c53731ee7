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

HOLD_SECONDS = 0.25
"""Seconds for which an item is held back, because other running ranks may print the same item.
On each rank, ipykernel sends printed text every 0.2 s."""

MAX_ROWS = 64
"""Maximum number of lines at the end of a stream that progress bars can still overwrite."""

REDRAWS = re.compile(r"\r|\x1b\[\d*[ABJK]")
"""A carriage return, or an escape sequence that moves the cursor up or down (tqdm's ``position=1``)
or erases text.  Sequences for colours do not match."""
PARTS = re.compile(rf"(\n|{REDRAWS.pattern})")
INCOMPLETE = re.compile(r"\x1b(\[\d*)?\Z")
"""The beginning of an escape sequence that is not complete yet."""


Item = tuple[str, str]
"""The kind and the text of a piece of output that is shown as a whole.
The kind is ``"stdout"``, ``"stderr"``, ``"bar"``, ``"display"``, ``"update"`` or ``"value"``.  The
text is a line without its line end, or the MIME bundle of a display as JSON with sorted keys."""

Block = tuple[list[int], list[Item]]
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
        screen = self._outputs[rank].screens.setdefault(stream, Screen(stream))
        self.add(rank, screen.write(text))

    def add(self, rank: int, items: Iterable[Item]) -> None:
        """Add displays of a rank, or the value that the cell returned on this rank."""
        output = self._outputs[rank]
        if not output.items:
            output.since = time.monotonic()
        output.items.extend(items)

    def put_back(self, rank: int, items: Sequence[Item]) -> None:
        """Put items before a rank's other items."""
        self._outputs[rank].items.extendleft(reversed(items))

    def clear(self, rank: int) -> None:
        """Drop the part of a rank's output that ``take`` has not returned yet."""
        self._outputs[rank] = RankOutput(is_running=self._outputs[rank].is_running)

    def finish(self, rank: int) -> None:
        """Mark a rank as finished, and complete its last lines."""
        output = self._outputs[rank]
        output.is_running = False
        for screen in output.screens.values():
            self.add(rank, screen.rest())
        output.screens.clear()

    def unfinished(self) -> dict[str, list[int]]:
        """Return the current text of each unfinished line (progress bar), and its ranks."""
        lines: dict[str, list[int]] = {}
        for rank, output in self._outputs.items():
            for line in {line for screen in output.screens.values() for line in screen.lines()}:
                lines.setdefault(line, []).append(rank)
        return lines

    def take(self, *, at_once: bool = False) -> list[Block]:
        """Remove and return the items that can be shown now, grouped by their ranks.

        If ``at_once``, return every item, even if other ranks may still write the same item.
        """
        blocks: list[Block] = []
        ahead: dict[int, Counter[Item]] = {}
        while ready := self._ready(at_once=at_once):
            first, *rest = ready.values()
            if all(items == first for items in rest):  # the fastest way to compare many ranks
                blocks.append((list(ready), list(first)))
                for items in ready.values():
                    items.clear()
                break
            ahead = ahead or {rank: Counter(output.items) for rank, output in self._outputs.items()}
            while all(ready.values()):
                heads = {rank: items[0] for rank, items in ready.items()}
                item = choose(heads, ahead)
                ranks = [rank for rank, head in heads.items() if head == item]
                for rank in ranks:
                    ready[rank].popleft()
                    ahead[rank][item] -= 1
                if blocks and blocks[-1][0] == ranks:
                    blocks[-1][1].append(item)
                else:
                    blocks.append((ranks, [item]))
        return blocks

    def _ready(self, *, at_once: bool) -> dict[int, deque[Item]]:
        """Return the items to show, by rank, or ``{}`` if other ranks may add equal items."""
        ready = {rank: output for rank, output in self._outputs.items() if output.items}
        lacking = self.running - ready.keys()
        oldest = min((output.since for output in ready.values()), default=0.0)
        if lacking and not at_once and time.monotonic() - oldest < HOLD_SECONDS:
            return {}
        return {rank: output.items for rank, output in ready.items()}


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


@dataclass(slots=True)
class ScreenRow:
    """A line of a screen.  After a carriage return, the next text replaces the line's text."""

    text: str = ""
    is_replaced: bool = False
    """True if the next text replaces the current text."""
    is_bar: bool = False
    """True if text has been written after a carriage return."""


class Screen:
    """The last lines of a stream as a terminal shows them.  Progress bars can overwrite the lines.

    Args:
        stream: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._rows = [ScreenRow()]
        self._row = 0
        """Index of the line to which the next text is added."""
        self._has_moved = False
        self._incomplete = ""

    def write(self, text: str) -> list[Item]:
        """Add text, and return the lines that are finished."""
        text, self._incomplete = self._incomplete + text, ""
        if found := INCOMPLETE.search(text):
            text, self._incomplete = text[: found.start()], found[0]
        row, *others = self._rows
        if not (others or row.is_replaced or row.is_bar or REDRAWS.search(text)):  # no bars
            *lines, row.text = (row.text + text).split("\n")
            return [(self._stream, line) for line in lines]
        for part in PARTS.split(text):
            row = self._rows[self._row]
            if part == "\n":
                self._move(1)
            elif part == "\r":
                row.is_replaced = True
            elif REDRAWS.fullmatch(part):
                if part[-1] in "AB":  # new text replaces old text, so erasing needs no action
                    self._has_moved = True
                    self._move(int(part[2:-1] or 1) * (1 if part[-1] == "B" else -1))
            elif part:
                row.is_bar |= row.is_replaced
                row.text = part if row.is_replaced else row.text + part
                row.is_replaced = False
        # A plain line finishes itself and all lines above it.
        above = enumerate(self._rows[: self._row], start=1)
        plain = [n for n, row in above if not row.is_bar and (row.text or not self._has_moved)]
        num = max(plain[-1] if plain else 0, min(len(self._rows) - MAX_ROWS, self._row))
        finished, self._rows = self._rows[:num], self._rows[num:]
        self._row -= num
        return self._items(finished)

    def rest(self) -> list[Item]:
        """Return the lines that are left when the stream ends."""
        last = self._rows[-1]
        return self._items(self._rows if last.text or last.is_replaced else self._rows[:-1])

    def lines(self) -> list[str]:
        """Return the current text of the lines that are not finished yet."""
        return [row.text for row in self._rows if row.text.strip()]

    def _move(self, distance: int) -> None:
        self._row = max(0, self._row + distance)
        if self._row < len(self._rows):
            self._rows[self._row].is_replaced = True
        self._rows += [ScreenRow() for _ in range(len(self._rows), self._row + 1)]

    def _items(self, rows: Sequence[ScreenRow]) -> list[Item]:
        items = [("bar" if row.is_bar else self._stream, row.text) for row in rows]
        return [(kind, text) for kind, text in items if kind != "bar" or text.strip()]
