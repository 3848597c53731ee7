"""How do the outputs of several ranks become one?  Equal pieces once.  (Notebook side.)

Each rank's output is a sequence of items: lines, displayed figures, values.  The
items of all ranks are merged into one sequence that keeps every rank's own order
and shows an item that several ranks have next as one, labelled with all of them.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOLD_SECONDS = 0.25
"""How long an item waits for the same item of ranks that are still running.

ipykernel on the ranks sends what was printed every 0.2 s.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of output that is shown as a whole."""

    kind: str
    """``"stdout"``, ``"stderr"``, ``"bar"``, ``"display"`` or ``"value"``."""
    text: str
    """A line without its end; for displays the bundle as JSON, which makes them comparable."""

    @property
    def bundle(self) -> dict[str, Any]:
        """The MIME bundle of a display or value: ``data``, ``metadata``, ``transient``."""
        content: dict[str, Any] = json.loads(self.text)
        return content


@dataclass(slots=True)
class RankOutput:
    """What one rank has said and has not been shown yet."""

    items: deque[Item] = field(default_factory=deque)
    counts: Counter[Item] = field(default_factory=Counter)
    partial: dict[str, str] = field(default_factory=dict)
    """The unfinished last line of each stream."""
    since: float = 0.0
    """When the oldest item not shown yet arrived, on the monotonic clock."""
    is_running: bool = True

    def add(self, item: Item) -> None:
        """Put an item behind the others."""
        if not self.items:
            self.since = time.monotonic()
        self.items.append(item)
        self.counts[item] += 1

    def pop(self) -> None:
        """Take the first item away."""
        item = self.items.popleft()
        self.counts[item] -= 1


class OutputMerger:
    """Merges the output of several ranks.

    Args:
        ranks: whose output is merged.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._outputs = {rank: RankOutput() for rank in ranks}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Take text that a rank wrote to ``"stdout"`` or ``"stderr"``."""
        output = self._outputs[rank]
        *lines, output.partial[stream] = (output.partial.get(stream, "") + text).split("\n")
        for line in lines:
            output.add(line_item(stream, line))

    def display(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Take a MIME bundle that a rank displayed or returned as a cell's value."""
        self._outputs[rank].add(Item(kind, json.dumps(content, sort_keys=True, default=str)))

    def finish(self, rank: int) -> None:
        """Note that a rank will write no more; its unfinished lines are complete now."""
        output = self._outputs[rank]
        output.is_running = False
        for stream, text in output.partial.items():
            if text:
                output.add(line_item(stream, text))
        output.partial.clear()

    def unfinished(self) -> dict[str, list[int]]:
        """Return unfinished lines as they look now (progress bars), each with its ranks."""
        lines: dict[str, list[int]] = {}
        for rank, output in self._outputs.items():
            for text in output.partial.values():
                if (line := visible(text)).strip():
                    lines.setdefault(line, []).append(rank)
        return lines

    def take(self) -> list[tuple[list[int], Item]]:
        """Return the merged items that can be shown now, each with its ranks."""
        taken: list[tuple[list[int], Item]] = []
        while (item := self._next_item()) is not None:
            ranks = [rank for rank, o in self._outputs.items() if o.items and o.items[0] == item]
            for rank in ranks:
                self._outputs[rank].pop()
            taken.append((ranks, item))
        return taken

    def _next_item(self) -> Item | None:
        outputs = self._outputs.values()
        speaking = [output for output in outputs if output.items]
        if not speaking:
            return None
        if any(o.is_running and not o.items for o in outputs):
            oldest = min(output.since for output in speaking)
            if time.monotonic() - oldest < HOLD_SECONDS:
                return None
        for output in speaking:
            item = output.items[0]
            if all(other.items[0] == item or not other.counts[item] for other in speaking):
                return item  # nobody has it further down: showing it now splits no pair
        return speaking[0].items[0]


def line_item(stream: str, line: str) -> Item:
    """Return a finished line: one that redrew itself, with carriage returns, is a bar."""
    line = line.rstrip("\r")
    return Item("bar" if "\r" in line else stream, visible(line))


def visible(line: str) -> str:
    """Return what is left to see of a line after its carriage returns."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]
