"""What a cell prints on the ranks during a comparison, shown below its table (kernel)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, final

from ddpnb.reports.displays import label_of
from ddpnb.reports.formatting import counted
from ddpnb.reports.merging import OutputMerger

MAX_LINES = 50
"""How many lines are shown; the others are counted."""


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
