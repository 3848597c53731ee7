"""Shows the ranks' output with labels, under a cell or after a comparison.  Runs in the kernel."""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from ddpnb.output.displays import Displays, label_of
from ddpnb.output.merging import HOLD_SECONDS, Block, Item, OutputMerger, Screen
from ddpnb.reports.formatting import counted
from ddpnb.reports.live import LiveDisplay
from ddpnb.reports.notebook import clear, show, write

BAR_SECONDS = 0.2
"""Minimum number of seconds between two redraws of progress bars (tqdm)."""

MAX_KEPT = 10_000
"""Maximum number of pieces of output that ddpnb keeps, to redraw them after ``clear_output()``."""

MAX_PRINTED_LINES = 50
"""Maximum number of printed lines to show.  A last line says how many more lines were printed."""

OUTPUT_KINDS = {
    "display_data": "display",
    "execute_result": "value",
    "update_display_data": "update",
}
"""Maps each type of Jupyter message to the kind of ``Item`` that ddpnb makes from the message."""

Message = dict[str, Any]

DISPLAYS = Displays()
"""The displays of all cells.  A cell can update the displays of earlier cells."""


@final
class CellOutput:
    """Shows the output of the ranks while they run a cell.  A label names the ranks of each output.

    Args:
        ranks: the ranks that run the cell.
        on_clear: a function that redraws the cell's other displays after a rank clears its output.
    """

    def __init__(self, ranks: Iterable[int], on_clear: Callable[[], None] = lambda: None) -> None:
        self._ranks = tuple(ranks)
        self._on_clear = on_clear
        self._merger = OutputMerger(self._ranks)
        self._bars = LiveDisplay()
        """The progress bars (tqdm), in a display below the output.  Finished bars stay there."""
        self._bars_text, self._bars_at = "", 0.0
        """The text that ``_bars`` shows, and the time at which it was drawn."""
        self._finished_bars: list[Block] = []
        self._cell = DISPLAYS.begin_cell()
        self._shown: deque[Block] = deque(maxlen=MAX_KEPT)
        """All output except progress bars, to redraw it after a rank clears its output."""
        self._clearing: set[int] = set()
        """Ranks that called ``clear_output(wait=True)`` and have not written output since then."""
        self._cleared_at: float | None = None
        """Time of the first ``clear_output()`` since the last redraw, or None if there was none."""

    def take(self, rank: int, kind: str, content: Message) -> None:
        """Add a message from a rank's output channel."""
        if kind == "clear_output" and content.get("wait"):
            self._clearing.add(rank)
        elif kind == "clear_output":
            self._clear(rank)
        elif kind == "stream" or kind in OUTPUT_KINDS:
            if rank in self._clearing and kind != "update_display_data":
                self._clear(rank)
            if kind == "stream":
                self._merger.write(rank, content["name"], content["text"])
            else:
                with DISPLAYS.lock:
                    item = DISPLAYS.item(rank, OUTPUT_KINDS[kind], content, self._cell)
                self._merger.add(rank, [item])

    def finish(self, rank: int) -> None:
        """Mark a rank as finished, after it has run the cell and all its output has arrived."""
        self._merger.finish(rank)

    def show(self, *, at_once: bool = False) -> None:
        """Show the output that is ready.  If ``at_once``, show all output that has arrived."""
        if self._cleared_at is None:
            self._emit(self._merger.take(at_once=at_once))
        else:
            is_fresh = time.monotonic() - self._cleared_at < HOLD_SECONDS
            if is_fresh and self._merger.running and not at_once:
                return  # the other ranks may clear their output too
            self._redraw()
        self._show_bars(self._merger.unfinished(), at_once=at_once)

    def close(self) -> None:
        """Show the remaining output.  A second call has no effect."""
        for rank in self._ranks:
            self._merger.finish(rank)
        self.show()
        self._show_bars({}, at_once=True)

    def _clear(self, rank: int) -> None:
        """Drop the output of a rank.  The next redraw shows only the output of other ranks."""
        self._clearing.discard(rank)
        self._merger.clear(rank)
        self._finished_bars = without(rank, self._finished_bars)
        self._shown = deque(without(rank, self._shown), MAX_KEPT)
        self._cleared_at = self._cleared_at or time.monotonic()

    def _redraw(self) -> None:
        """Clear the cell, and show again all output that its ranks have not cleared."""
        for rank in self._ranks:
            items = [item for ranks, items in self._shown if rank in ranks for item in items]
            with DISPLAYS.lock:
                current = [DISPLAYS.current(rank, item) for item in items]
            self._merger.put_back(rank, current)
        blocks = self._merger.take(at_once=True)
        self._shown.clear()
        self._cleared_at = None
        clear(wait=bool(blocks))
        self._on_clear()
        self._bars, self._bars_text = LiveDisplay(), ""
        self._emit(blocks)

    def _emit(self, blocks: Sequence[Block]) -> None:
        stream, text = "stdout", ""
        for ranks, items in blocks:
            label = label_of(ranks)
            if bars := [item for item in items if item[0] == "bar"]:
                self._finished_bars.append((ranks, bars))
            if kept := [item for item in items if item[0] not in ("bar", "update")]:
                self._shown.append((ranks, kept))
            for kind, each in items:
                if kind in ("stdout", "stderr"):
                    if kind != stream:
                        write(stream, text)
                        stream, text = kind, ""
                    text += f"{label} {each}\n"
                elif kind != "bar":
                    write(stream, text)
                    text = ""
                    with DISPLAYS.lock:
                        self._show_bundle(ranks, kind, each)
        write(stream, text)

    def _show_bundle(self, ranks: Sequence[int], kind: str, text: str) -> None:
        """Show a display, or the value of the cell, under the label of its ranks."""
        bundle, label = json.loads(text), label_of(ranks)
        name, data = bundle.get("name"), bundle["data"]
        if name is not None and kind == "update":
            DISPLAYS.update(ranks, name, text)
        elif kind == "value" and set(data) == {"text/plain"}:
            separator = "\n" if "\n" in data["text/plain"] else " "
            write("stdout", f"{label}{separator}{data['text/plain']}\n")
        elif name is not None:
            DISPLAYS.show(ranks, name, text)
        else:
            write("stdout", f"{label}\n")
            show(data, bundle["metadata"])

    def _show_bars(self, unfinished: Mapping[str, list[int]], *, at_once: bool) -> None:
        finished = [(ranks, text) for ranks, items in self._finished_bars for _, text in items]
        running = [(ranks, text) for text, ranks in unfinished.items()]
        text = "\n".join(f"{label_of(ranks)} {line}" for ranks, line in finished + running)
        now = time.monotonic()
        if text != self._bars_text and (at_once or now - self._bars_at > BAR_SECONDS):
            self._bars.show_text(text)
            self._bars_text, self._bars_at = text, now


@final
class PrintedLines:
    """Collects lines that ranks print during a comparison, and shows equal lines only once."""

    def __init__(self) -> None:
        self._lines: dict[str, set[int]] = {}
        self._num_more: Counter[int] = Counter()
        """For each rank, the number of its printed lines that are not shown."""
        self._screens: dict[tuple[int, str], Screen] = {}

    def take(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Add a message from a rank's output channel."""
        stream, text = "stdout", content.get("data", {}).get("text/plain", "")
        if kind == "stream":
            stream, text = content["name"], content["text"]
        elif text:
            text += "\n"
        screen = self._screens.setdefault((rank, stream), Screen(stream))
        self._add(rank, screen.write(text))

    def end(self) -> None:
        """Add the lines that the ranks have not finished.  A second call has no effect."""
        for (rank, _), screen in self._screens.items():
            self._add(rank, screen.rest())
        self._screens.clear()

    def show(self) -> None:
        """Print the lines, if there are any."""
        self.end()
        if not self._lines:
            return
        lines = [f"{label_of(ranks)} {line}" for line, ranks in self._lines.items()]
        num = max(self._num_more.values(), default=0)
        more = [f"... and {counted(num, 'more line')}"] if num else []
        write("stdout", "\n".join(["Printed by the cell:", *lines, *more, ""]))

    def _add(self, rank: int, items: Iterable[Item]) -> None:
        for _, line in items:
            if line in self._lines or len(self._lines) < MAX_PRINTED_LINES:
                self._lines.setdefault(line, set()).add(rank)
            else:
                self._num_more[rank] += 1


def without(rank: int, blocks: Iterable[Block]) -> list[Block]:
    """Return blocks without the part of one rank."""
    rest = (([each for each in ranks if each != rank], items) for ranks, items in blocks)
    return [(ranks, items) for ranks, items in rest if ranks]
