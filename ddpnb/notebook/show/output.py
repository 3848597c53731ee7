"""How does the ranks' output appear under a cell?  (Notebook side.)"""

import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from IPython.display import display

from ddpnb.notebook.ranks import format_ranks
from ddpnb.notebook.show.merge import Item, OutputMerger
from ddpnb.notebook.show.slot import Slot

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
        self._slot = Slot()
        self._shown = ""
        self._shown_at = 0.0

    def show(self, running: list[str], *, at_once: bool = False) -> None:
        """Show the finished and the running lines, at most every ``BAR_SECONDS``."""
        text = "\n".join(self.finished + running)
        now = time.monotonic()
        if text != self._shown and (at_once or now - self._shown_at > BAR_SECONDS):
            self._slot.show_text(text)
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
