"""What all ranks show under one cell, or print during a comparison, with labels (kernel)."""

import itertools
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, TextIO, final

from IPython.display import clear_output, display

from ddpnb.reports.displays import Displays, label_of
from ddpnb.reports.formatting import counted
from ddpnb.reports.live import LiveDisplay
from ddpnb.reports.merging import HOLD_SECONDS, Item, OutputMerger, Run

BAR_SECONDS = 0.2
"""The shortest time between two redraws of progress bars (tqdm), or of what ranks clear."""

MUCH_TEXT = 100_000
"""How many letters are not waited for until they are sent."""

MAX_KEPT = 20_000_000
"""How many letters, also of pictures, come back after another rank has cleared its own."""

MAX_LINES = 50
"""How many printed lines of a comparison are shown; the others are counted."""

Message = dict[str, Any]


@cache
def _displays() -> Displays:
    """Return the displays of this kernel: a cell may update one of an earlier cell."""
    return Displays()


@final
class CellOutput:
    """Shows what the ranks print and display, with labels, while their cell runs.

    Args:
        ranks: the ranks that run the cell.
        on_clear: shows again what else stands under the cell, after ranks have cleared it.
    """

    def __init__(self, ranks: Iterable[int], on_clear: Callable[[], None] = lambda: None) -> None:
        self._ranks = tuple(ranks)
        self._on_clear = on_clear
        self._merger = OutputMerger(self._ranks)
        self._bars = Bars()
        self._streams = Streams()
        self._displays = _displays()
        self._displays.begin_cell()
        self._shown: deque[Run] = deque()
        """What stands under the cell, except bars; needed where a rank clears its part of it."""
        self._num_shown = 0
        self._updates: dict[tuple[int, str], Item] = {}
        """What a rank shows now in place of a display's first content."""
        self._clearing: set[int] = set()
        """Ranks that clear their output as soon as they write more."""
        self._cleared: set[int] = set()
        """Ranks that have cleared their output since it was last drawn."""
        self._cleared_at = 0.0
        self._drawn_at = 0.0

    def take(self, rank: int, kind: str, content: Message) -> None:
        """Add a message from a rank's output channel."""
        match kind:
            case "clear_output" if content.get("wait"):
                self._clearing.add(rank)
            case "clear_output":
                self._clear(rank)
            case "update_display_data":
                self._merger.add(rank, [self._displays.item(rank, "update", content)])
            case "stream" | "display_data" | "execute_result":
                if rank in self._clearing:
                    self._clear(rank)
                self._add(rank, kind, content)

    def finish(self, rank: int) -> None:
        """Note that a rank has ended the cell and all of its output has arrived."""
        self._merger.finish(rank)

    def show(self, *, at_once: bool = False) -> None:
        """Show all that can be shown now; ``at_once``: all that has come."""
        if self._cleared and not at_once and not self._is_redraw_due():
            return
        if self._cleared:
            self._redraw()
        else:
            self._emit(self._merger.take(at_once=at_once))
        running = [labelled(on, text) for text, on in self._merger.unfinished().items()]
        self._bars.show(running, at_once=at_once)

    def close(self) -> None:
        """Show the rest; may be called twice."""
        for rank in self._ranks:
            self._merger.finish(rank)
        self.show()
        self._bars.show([], at_once=True)

    def _add(self, rank: int, kind: str, content: Message) -> None:
        match kind:
            case "stream":
                self._merger.write(rank, content["name"], content["text"])
            case "display_data":
                self._merger.add(rank, [self._displays.item(rank, "display", content)])
            case "execute_result":
                self._merger.add(rank, [self._displays.item(rank, "value", content)])

    def _clear(self, rank: int) -> None:
        """Drop all that a rank has written; the others' part is drawn again."""
        self._clearing.discard(rank)
        self._merger.clear(rank)
        self._bars.clear(rank)
        rest = [([r for r in ranks if r != rank], items) for ranks, items in self._shown]
        self._shown = deque((ranks, items) for ranks, items in rest if ranks)
        self._num_shown = sum(num_letters(items) for _, items in self._shown)
        if not self._cleared:
            self._cleared_at = time.monotonic()
        self._cleared.add(rank)

    def _is_redraw_due(self) -> bool:
        """Return whether all ranks have cleared their output, or one has a while ago."""
        now = time.monotonic()
        running = self._merger.running
        if not running or now - self._cleared_at > HOLD_SECONDS:
            return True
        return self._cleared >= running and now - self._drawn_at > BAR_SECONDS

    def _redraw(self) -> None:
        """Show anew what the ranks have written since each cleared its output."""
        for rank in self._ranks:
            items = [item for ranks, items in self._shown if rank in ranks for item in items]
            self._merger.put_back(rank, [self._current(rank, item) for item in items])
        runs = self._merger.take(at_once=True)
        self._shown.clear()
        self._num_shown = 0
        self._cleared.clear()
        self._drawn_at = time.monotonic()
        clear_output(wait=bool(runs))
        self._on_clear()
        self._bars.appear()
        self._emit(runs)

    def _current(self, rank: int, item: Item) -> Item:
        """Return an item as it looks now, if it is a display that was updated."""
        kind, text = item
        if kind != "display":
            return item
        return self._updates.get((rank, json.loads(text).get("name", "")), item)

    def _emit(self, runs: Sequence[Run]) -> None:
        chunk: list[str] = []
        stream = "stdout"
        for ranks, items in runs:
            label = label_of(ranks)
            for kind, group in grouped(items):
                texts = list(map(itemgetter(1), group))
                if chunk and kind not in (stream, "bar"):
                    self._streams.write(stream, chunk)
                if kind == "bar":
                    self._bars.finished += [(ranks, line) for line in texts]
                elif kind in ("stdout", "stderr"):
                    stream = kind
                    separator = f"\n{label} "
                    chunk.append(f"{label} {separator.join(texts)}\n")
                else:
                    for text in texts:
                        self._show_bundle(ranks, kind, json.loads(text))
                if kind not in ("bar", "update"):
                    self._shown.append((ranks, group))
                    self._num_shown += num_letters(group)
        while self._num_shown > MAX_KEPT and len(self._shown) > 1:
            self._num_shown -= num_letters(self._shown.popleft()[1])
        self._streams.write(stream, chunk)

    def _show_bundle(self, ranks: Sequence[int], kind: str, bundle: Mapping[str, Any]) -> None:
        """Show a display or a cell's value under the label of its ranks."""
        name, label, data = bundle.get("name"), label_of(ranks), bundle["data"]
        if kind == "update" and name is not None:
            self._displays.update(ranks, bundle)
            item = "display", json.dumps(bundle, sort_keys=True)
            self._updates |= {(rank, name): item for rank in ranks}
        elif kind == "value" and set(data) == {"text/plain"}:
            text = data["text/plain"]
            self._streams.write(
                "stdout", [f"{label} {text}\n" if "\n" not in text else f"{label}\n{text}\n"]
            )
        elif name is not None:
            self._displays.show(ranks, bundle)
        else:
            self._streams.write("stdout", [f"{label}\n"])
            display(data, raw=True, metadata=bundle["metadata"] or {})


@final
class PrintedLines:
    """The lines that ranks print in the calls of a comparison: equal lines of several once.

    A line is equal to that of an earlier call if both calls print it for the first time, or both
    for the second time, and so on.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], set[int]] = {}
        """A line and how often its call had printed it before, with the ranks that did."""
        self._num_more = 0
        self._merger = OutputMerger(())
        self._seen: Counter[str] = Counter()
        """How often the current call has printed a line that is shown."""

    def begin(self, ranks: Iterable[int]) -> None:
        """Begin a call on some ranks, and end the one before."""
        self.end()
        self._merger = OutputMerger(ranks)
        self._seen.clear()

    def take(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Add a message from a rank's output channel."""
        if kind == "stream":
            self._merger.write(rank, content["name"], content["text"])
        elif text := content.get("data", {}).get("text/plain"):
            self._merger.write(rank, "stdout", f"{text}\n")
        self._collect()

    def end(self) -> None:
        """End the current call; may be called twice."""
        for rank in self._merger.running:
            self._merger.finish(rank)
        self._collect()

    def show(self) -> None:
        """Print the lines, if there are any."""
        self.end()
        if not self._lines:
            return
        lines = [f"{label_of(ranks)} {line}" for (line, _), ranks in self._lines.items()]
        more = [f"... and {counted(self._num_more, 'more line')}"] if self._num_more else []
        print("Printed by the cell:", *lines, *more, sep="\n")

    def _collect(self) -> None:
        for ranks, items in self._merger.take():
            for _, line in items:
                key = line, self._seen[line]
                if key in self._lines or len(self._lines) < MAX_LINES:
                    self._lines.setdefault(key, set()).update(ranks)
                    self._seen[line] += 1
                else:
                    self._num_more += 1


def num_letters(items: Iterable[Item]) -> int:
    """Return how much text some items are."""
    return sum(len(text) for _, text in items)


def grouped(items: list[Item]) -> Iterable[tuple[str, list[Item]]]:
    """Yield successive items of one kind, with the kind."""
    if len(items) == 1 or all(map(items[0][0].__eq__, map(itemgetter(0), items))):
        yield items[0][0], items  # by far the quickest way for many
        return
    for kind, group in itertools.groupby(items, itemgetter(0)):
        yield kind, list(group)


@final
class Bars:
    """Progress bars (tqdm) in a display of their own; their last state stays."""

    def __init__(self) -> None:
        self.finished: list[tuple[Sequence[int], str]] = []
        self._display = LiveDisplay()
        self._shown = ""
        self._shown_at = 0.0

    def show(self, running: list[str], *, at_once: bool = False) -> None:
        """Show the finished and the running bars, at most every ``BAR_SECONDS``."""
        finished = [labelled(ranks, text) for ranks, text in self.finished]
        text = "\n".join(finished + running)
        now = time.monotonic()
        if text != self._shown and (at_once or now - self._shown_at > BAR_SECONDS):
            self._display.show_text(text)
            self._shown, self._shown_at = text, now

    def clear(self, rank: int) -> None:
        """Drop the finished bars of a rank."""
        rest = [([r for r in ranks if r != rank], text) for ranks, text in self.finished]
        self.finished = [(ranks, text) for ranks, text in rest if ranks]

    def appear(self) -> None:
        """Appear anew, below what stands under the cell now, once there is a bar."""
        self._display, self._shown = LiveDisplay(), ""


def labelled(ranks: Sequence[int], text: str) -> str:
    """Return a line after the label of its ranks: ``"[0-3] hello"``."""
    return f"{label_of(ranks)} {text}"


class Streams:
    """This process's stdout and stderr, in the order in which they are written to."""

    def __init__(self) -> None:
        self._last = "stdout"

    def write(self, stream: str, chunks: list[str]) -> None:
        """Write text in one call, and empty the list; another thread sends much text meanwhile."""
        if not chunks:
            return
        if stream != self._last:
            _file(self._last).flush()
            self._last = stream
        text = "".join(chunks)
        _file(stream).write(text)
        if len(text) < MUCH_TEXT:
            _file(stream).flush()
        chunks.clear()


def _file(stream: str) -> TextIO:
    return sys.stderr if stream == "stderr" else sys.stdout
