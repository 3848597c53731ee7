"""Displays that have an id, so that ranks can replace the content later.  Runs in the kernel.

Ranks with the same content share one place under the cell.  If a rank then shows different content,
this rank gets a new place below.  If all contents become equal again, the ranks share one place.
"""

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, final

from ddpnb.output.merging import Item
from ddpnb.protocol.notation import format_ranks
from ddpnb.reports.live import WIDGET_VIEW, LiveDisplay

MAX_DISPLAYS = 1000
"""Maximum number of displays that ranks can still update.  Older displays do not change."""

GENERATED = re.compile(r"[0-9a-f]{32}")
"""An id that IPython generated.  IPython generates different ids on each rank."""

Content = Mapping[str, Any]

NOTHING: tuple[set[int], Content] = (set(), {"data": {"text/plain": ""}})


@dataclass(slots=True)
class Place:
    """A place under a cell: a label, and below it the content of one rank or several ranks."""

    ranks: set[int] = field(default_factory=set)
    bundle: Content = field(default_factory=dict)
    label: LiveDisplay = field(default_factory=LiveDisplay)
    content: LiveDisplay = field(default_factory=LiveDisplay)

    def show(self, ranks: set[int], bundle: Content) -> None:
        """Show a MIME bundle with the label of ``ranks``.  If ``ranks`` is empty, show no label."""
        if ranks != self.ranks:
            self.ranks = ranks
            self.label.show_text(label_of(ranks) if ranks else "")
        self.bundle = bundle
        self.content.show(bundle["data"], bundle.get("metadata"))


@final
class Displays:
    """The places of all displays with an id, from this cell and earlier cells."""

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[int, str], str] = OrderedDict()
        self._places: OrderedDict[str, list[Place]] = OrderedDict()
        self._num_cells = 0
        self._num_generated: Counter[tuple[int, int]] = Counter()
        self.lock = threading.Lock()
        """A lock for callers, because cells in the background show displays too."""

    def begin_cell(self) -> int:
        """Return the number of a new cell.  Each cell numbers the displays without a given id."""
        self._num_cells += 1
        return self._num_cells

    def item(self, rank: int, kind: str, content: Content, cell: int) -> Item:
        """Return a display as an ``Item``.  Ranks that show the same content get equal items."""
        bundle = {"data": without_widget(content["data"]), "metadata": content.get("metadata")}
        if given := content.get("transient", {}).get("display_id"):
            bundle["name"] = self._name(rank, str(given), cell)
        return kind, json.dumps(bundle, sort_keys=True, default=str)

    def show(self, ranks: Sequence[int], bundle: Content) -> None:
        """Show a display for the first time."""
        places = self._places.setdefault(bundle["name"], [])
        for place in places:
            place.ranks -= set(ranks)  # an earlier display with this id keeps its content
        places[:] = [place for place in places if place.ranks]
        places.append(place := Place())
        place.show(set(ranks), bundle)
        self._places.move_to_end(bundle["name"])
        while len(self._places) > MAX_DISPLAYS:
            self._places.popitem(last=False)

    def update(self, ranks: Sequence[int], bundle: Content) -> None:
        """Replace the content of a display.  If the display's id is unknown, change nothing."""
        places = self._places.get(bundle["name"], [])
        if places:
            self._places.move_to_end(bundle["name"])
        affected = [place for place in places if place.ranks & set(ranks)]
        chosen = {rank for place in affected for rank in place.ranks if rank in ranks}
        rest = [(place.ranks - chosen, place.bundle) for place in affected]
        groups = [group for group in [(chosen, bundle), *rest] if group[0]]
        groups.sort(key=lambda group: min(group[0]))
        for place, group in zip_longest(affected, groups):
            if place is None:
                places.append(place := Place())
            if group != (place.ranks, place.bundle):
                place.show(*(group or NOTHING))

    def current(self, rank: int, item: Item) -> Item:
        """Return a rank's item, with the current content if the item is an updated display."""
        kind, text = item
        places = self._places.get(json.loads(text).get("name"), []) if kind == "display" else []
        bundle = next((place.bundle for place in places if rank in place.ranks), None)
        return (kind, json.dumps(bundle, sort_keys=True)) if bundle else item

    def _name(self, rank: int, given: str, cell: int) -> str:
        """Return a display's id, in a form that is the same on all ranks."""
        if not GENERATED.fullmatch(given):
            return given
        if (rank, given) not in self._names:
            self._num_generated[cell, rank] += 1
            self._names[rank, given] = f"{cell}-{self._num_generated[cell, rank]}"
            while len(self._names) > MAX_DISPLAYS:
                self._names.popitem(last=False)
        self._names.move_to_end((rank, given))
        return self._names[rank, given]


def without_widget(data: Content) -> Content:
    """Remove a widget's view from a MIME bundle, unless the bundle has no other content."""
    kept = {mime: value for mime, value in data.items() if mime != WIDGET_VIEW}
    return kept or data


def label_of(ranks: Iterable[int]) -> str:
    """Return the label of a list of ranks, e.g. ``"[0-3]"``."""
    return f"[{format_ranks(tuple(ranks))}]"
