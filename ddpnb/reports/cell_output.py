"""How does the ranks' output appear under a cell?  Equal pieces once.  (Notebook side.)

Each rank's output is a sequence of items: lines, displayed figures, values.  The
items of all ranks are merged into one sequence that keeps every rank's own order
and shows an item that several ranks have next as one, labelled with all of them.
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

from ddpnb.protocol.rank_sets import format_ranks
from ddpnb.reports.display import LiveDisplay

HOLD_SECONDS = 0.25
"""How long an item waits for the same item of ranks that are still running.

ipykernel on the ranks sends what was printed every 0.2 s.
"""


class Item(NamedTuple):
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
    partial: dict[str, str] = field(default_factory=dict)
    """The unfinished last line of each stream."""
    since: float = 0.0
    """When the oldest item not shown yet arrived, on the monotonic clock."""
    is_running: bool = True

    def add(self, items: Iterable[Item]) -> None:
        """Put items behind the others."""
        if not self.items:
            self.since = time.monotonic()
        self.items.extend(items)


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
        whole = output.partial.get(stream, "") + text
        *lines, output.partial[stream] = whole.split("\n")
        if "\r" in whole:
            output.add(line_item(stream, line) for line in lines)
        else:
            output.add(Item(stream, line) for line in lines)

    def display(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Take a MIME bundle that a rank displayed or returned as a cell's value."""
        self._outputs[rank].add([Item(kind, json.dumps(content, sort_keys=True, default=str))])

    def finish(self, rank: int) -> None:
        """Note that a rank will write no more; its unfinished lines are complete now."""
        output = self._outputs[rank]
        output.is_running = False
        output.add(line_item(stream, text) for stream, text in output.partial.items() if text)
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
        ahead: dict[int, Counter[Item]] = {}
        while speaking := self._speaking():
            heads = {rank: output.items[0] for rank, output in speaking.items()}
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

    def _speaking(self) -> dict[int, RankOutput]:
        """Return the ranks that have something to show; none while it is worth waiting."""
        speaking = {rank: output for rank, output in self._outputs.items() if output.items}
        if len(speaking) == len(self._outputs) or not speaking:
            return speaking
        others_run = any(o.is_running and not o.items for o in self._outputs.values())
        oldest = min(output.since for output in speaking.values())
        is_fresh = time.monotonic() - oldest < HOLD_SECONDS
        return {} if others_run and is_fresh else speaking


def choose(heads: Mapping[int, Item], ahead: Mapping[int, Counter[Item]]) -> Item:
    """Return which of the ranks' next items comes first: one that no rank has further down.

    Showing it now splits no pair of equal items.
    """
    for item in heads.values():
        if all(head == item or not ahead[rank][item] for rank, head in heads.items()):
            return item
    return next(iter(heads.values()))


def line_item(stream: str, line: str) -> Item:
    """Return a finished line: one that redrew itself, with carriage returns, is a bar."""
    line = line.rstrip("\r")
    return Item("bar" if "\r" in line else stream, visible(line))


def visible(line: str) -> str:
    """Return what is left to see of a line after its carriage returns."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


BAR_SECONDS = 0.2
"""How often the lines in progress (tqdm) are redrawn."""

Message = dict[str, Any]


class CellOutput:
    """Shows what ranks print and display, labelled, while their cell runs.

    Args:
        ranks: the ranks that run the cell.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._merger = OutputMerger(ranks)
        self._bars = Bars()

    def take(self, rank: int, kind: str, content: Message) -> None:
        """Take a message of a rank's output channel."""
        match kind:
            case "stream":
                self._merger.write(rank, content["name"], content["text"])
            case "display_data" | "update_display_data":
                update = {"update": kind == "update_display_data"}
                self._merger.display(rank, "display", content | update)
            case "execute_result":
                self._merger.display(rank, "value", {"data": content["data"]})

    def finish(self, rank: int) -> None:
        """Note that a rank has ended the cell, and all its output is here."""
        self._merger.finish(rank)

    def show(self) -> None:
        """Show what can be shown by now."""
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
        self._bars.show([labelled(who, text) for text, who in self._merger.unfinished().items()])

    def close(self) -> None:
        """Show the rest; may be called twice."""
        for rank in self._ranks:
            self._merger.finish(rank)
        self.show()
        self._bars.show([], at_once=True)


class Bars:
    """Lines that redraw themselves (tqdm), in a place of their own; the last state stays."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self._display = LiveDisplay()
        self._shown = ""
        self._shown_at = 0.0

    def show(self, running: list[str], *, at_once: bool = False) -> None:
        """Show the finished and the running lines, at most every ``BAR_SECONDS``."""
        text = "\n".join(self.finished + running)
        now = time.monotonic()
        if text != self._shown and (at_once or now - self._shown_at > BAR_SECONDS):
            self._display.show_text(text)
            self._shown, self._shown_at = text, now


def labelled(ranks: Sequence[int], text: str) -> str:
    """Return a line with its ranks before it: ``"[0-3] hello"``."""
    return f"[{label_of(tuple(ranks))}] {text}"


@cache
def label_of(ranks: tuple[int, ...]) -> str:
    """Return the label of some ranks; a cell of many lines asks for the same ones."""
    return format_ranks(ranks)


def write(stream: str, lines: list[str]) -> None:
    """Write lines to this process's stdout or stderr at once, and empty the list."""
    if lines:
        file = sys.stderr if stream == "stderr" else sys.stdout
        file.write("".join(lines))
        file.flush()
        lines.clear()


def show_bundle(ranks: list[int], item: Item) -> None:
    """Show a display or a cell's value, under a label that names its ranks."""
    label, bundle = f"[{format_ranks(ranks)}]", item.bundle
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
