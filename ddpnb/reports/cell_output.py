"""The output of all ranks under one cell, equal pieces shown once (kernel).

Each rank's output is a sequence of items: lines, displayed figures, values.  The items of all
ranks are merged into one sequence.  It keeps the order of every rank.  An item that is next
on several ranks is shown once, labelled with all of them.
"""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from IPython.display import display

from ddpnb.protocol.notation import format_ranks
from ddpnb.reports.live import LiveDisplay

HOLD_SECONDS = 0.25
"""How long an item waits for the same item from ranks that are still running.

On the ranks, ipykernel sends printed text every 0.2 s.
"""


class Item(NamedTuple):
    """A piece of output that is shown as a whole."""

    kind: str
    """``"stdout"``, ``"stderr"``, ``"bar"``, ``"display"`` or ``"value"``."""
    text: str
    """A line without its line end, or a display's bundle as JSON, so that two can be compared."""

    @property
    def bundle(self) -> dict[str, Any]:
        """The MIME bundle of a display or value: ``data``, ``metadata``, ``transient``."""
        content: dict[str, Any] = json.loads(self.text)
        return content


@dataclass(slots=True)
class RankOutput:
    """One rank's output that is not shown yet."""

    items: deque[Item] = field(default_factory=deque)
    partial: dict[str, str] = field(default_factory=dict)
    """The unfinished last line of each stream."""
    since: float = 0.0
    """When the oldest of ``items`` arrived, on the monotonic clock."""
    is_running: bool = True

    def add(self, items: Iterable[Item]) -> None:
        """Append items."""
        if not self.items:
            self.since = time.monotonic()
        self.items.extend(items)


class OutputMerger:
    """Merges the output of several ranks.

    Args:
        ranks: the ranks that run the cell.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._outputs = {rank: RankOutput() for rank in ranks}

    def write(self, rank: int, stream: str, text: str) -> None:
        """Add text that a rank wrote to ``"stdout"`` or ``"stderr"``."""
        output = self._outputs[rank]
        joined = output.partial.get(stream, "") + text
        *lines, output.partial[stream] = joined.split("\n")
        if "\r" in joined:
            output.add(line_item(stream, line) for line in lines)
        else:
            output.add(Item(stream, line) for line in lines)

    def display(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Add a MIME bundle that a rank displayed, or returned as the cell's value."""
        self._outputs[rank].add([Item(kind, json.dumps(content, sort_keys=True, default=str))])

    def finish(self, rank: int) -> None:
        """Note that a rank writes no more; its unfinished lines are complete now."""
        output = self._outputs[rank]
        output.is_running = False
        output.add(line_item(stream, text) for stream, text in output.partial.items() if text)
        output.partial.clear()

    def unfinished(self) -> dict[str, list[int]]:
        """Return the unfinished lines (progress bars) as they look now, each with its ranks."""
        lines: dict[str, list[int]] = {}
        for rank, output in self._outputs.items():
            for text in output.partial.values():
                if (line := visible(text)).strip():
                    lines.setdefault(line, []).append(rank)
        return lines

    def take(self) -> list[tuple[list[int], Item]]:
        """Remove and return the items that can be shown now, each with its ranks."""
        taken: list[tuple[list[int], Item]] = []
        ahead: dict[int, Counter[Item]] = {}
        while ready := self._ready():
            heads = {rank: output.items[0] for rank, output in ready.items()}
            item = next(iter(heads.values()))
            if any(head != item for head in heads.values()):
                ahead = ahead or {r: Counter(o.items) for r, o in self._outputs.items()}
                item = choose(heads, ahead)
            ranks = [rank for rank, head in heads.items() if head == item]
            for rank in ranks:
                self._outputs[rank].items.popleft()
                if ahead:
                    ahead[rank][item] -= 1
            taken.append((ranks, item))
        return taken

    def _ready(self) -> dict[int, RankOutput]:
        """Return the ranks with items to show; none while waiting for the others may help."""
        ready = {rank: output for rank, output in self._outputs.items() if output.items}
        if len(ready) == len(self._outputs) or not ready:
            return ready
        others_run = any(o.is_running and not o.items for o in self._outputs.values())
        oldest = min(output.since for output in ready.values())
        is_fresh = time.monotonic() - oldest < HOLD_SECONDS
        return {} if others_run and is_fresh else ready


def choose(heads: Mapping[int, Item], ahead: Mapping[int, Counter[Item]]) -> Item:
    """Return which of the ranks' next items to show: one that no other rank has further down.

    Showing such an item never splits equal items of several ranks.
    """
    for item in heads.values():
        if all(head == item or not ahead[rank][item] for rank, head in heads.items()):
            return item
    return next(iter(heads.values()))


def line_item(stream: str, line: str) -> Item:
    """Return a finished line as an item; a line with carriage returns was a progress bar."""
    line = line.rstrip("\r")
    return Item("bar" if "\r" in line else stream, visible(line))


def visible(line: str) -> str:
    """Return the part of a line that its carriage returns leave visible."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


BAR_SECONDS = 0.2
"""The shortest time between two redraws of progress bars (tqdm)."""

Message = dict[str, Any]


class CellOutput:
    """Shows what the ranks print and display, with labels, while their cell runs.

    Args:
        ranks: the ranks that run the cell.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._merger = OutputMerger(ranks)
        self._bars = Bars()

    def take(self, rank: int, kind: str, content: Message) -> None:
        """Add a message from a rank's output channel."""
        match kind:
            case "stream":
                self._merger.write(rank, content["name"], content["text"])
            case "display_data" | "update_display_data":
                update = {"update": kind == "update_display_data"}
                self._merger.display(rank, "display", content | update)
            case "execute_result":
                self._merger.display(rank, "value", {"data": content["data"]})

    def finish(self, rank: int) -> None:
        """Note that a rank has ended the cell and all of its output has arrived."""
        self._merger.finish(rank)

    def show(self) -> None:
        """Show all that can be shown now."""
        chunk: list[str] = []
        stream = "stdout"
        for ranks, item in self._merger.take():
            if chunk and item.kind not in (stream, "bar"):
                write(stream, chunk)
            if item.kind == "bar":
                self._bars.finished.append(labelled(ranks, item.text))
            elif item.kind in ("stdout", "stderr"):
                stream = item.kind
                chunk.append(labelled(ranks, item.text) + "\n")
            else:
                show_bundle(ranks, item)
        write(stream, chunk)
        self._bars.show([labelled(on, text) for text, on in self._merger.unfinished().items()])

    def close(self) -> None:
        """Show the rest; may be called twice."""
        for rank in self._ranks:
            self._merger.finish(rank)
        self.show()
        self._bars.show([], at_once=True)


class Bars:
    """Progress bars (tqdm) in a display of their own; their last state stays."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self._display = LiveDisplay()
        self._shown = ""
        self._shown_at = 0.0

    def show(self, running: list[str], *, at_once: bool = False) -> None:
        """Show the finished and the running bars, at most every ``BAR_SECONDS``."""
        text = "\n".join(self.finished + running)
        now = time.monotonic()
        if text != self._shown and (at_once or now - self._shown_at > BAR_SECONDS):
            self._display.show_text(text)
            self._shown, self._shown_at = text, now


def labelled(ranks: Sequence[int], text: str) -> str:
    """Return a line after the label of its ranks: ``"[0-3] hello"``."""
    return f"{label_of(tuple(ranks))} {text}"


@cache
def label_of(ranks: tuple[int, ...]) -> str:
    """Return e.g. ``"[0-3]"``; cached, because most lines of a cell have the same ranks."""
    return f"[{format_ranks(ranks)}]"


def write(stream: str, lines: list[str]) -> None:
    """Write lines to this process's stdout or stderr in one call, and empty the list."""
    if lines:
        file = sys.stderr if stream == "stderr" else sys.stdout
        file.write("".join(lines))
        file.flush()
        lines.clear()


def show_bundle(ranks: list[int], item: Item) -> None:
    """Show a display or a cell's value under the label of its ranks."""
    label, bundle = label_of(tuple(ranks)), item.bundle
    data = bundle["data"]
    if item.kind == "value" and set(data) == {"text/plain"}:
        text = data["text/plain"]
        write("stdout", [f"{label} {text}\n" if "\n" not in text else f"{label}\n{text}\n"])
        return
    update = bundle.get("update", False)
    if not update:
        write("stdout", [f"{label}\n"])
    display_id = bundle.get("transient", {}).get("display_id")
    options = {"display_id": f"{label}{display_id}", "update": update} if display_id else {}
    display(data, raw=True, metadata=bundle.get("metadata") or {}, **options)
