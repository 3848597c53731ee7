"""Displays that have an id, so that ranks can replace the content later.  Runs in the kernel.

Each rank has a place for each of its displays.  If ranks show the same content, it appears only in
the place of the first of these ranks, and the other places are empty.
"""

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ddpnb.output.merging import Item
from ddpnb.protocol.notation import format_ranks
from ddpnb.reports.live import WIDGET_VIEW, LiveDisplay

MAX_DISPLAYS = 1000
"""Maximum number of displays that ranks can still update.  Older displays do not change."""

GENERATED = re.compile(r"[0-9a-f]{32}")
"""An id that IPython generated.  IPython generates different ids on each rank."""

EMPTY = json.dumps({"data": {"text/plain": ""}})


@dataclass(slots=True)
class DisplayPlace:
    """The place of a rank's display under a cell.  It appears when it first has content."""

    bundle: str
    """The rank's content, as JSON.  Another rank's place may show it."""
    shown: tuple[str, str] = ("", EMPTY)
    """The label and the content that this place shows now."""
    label: LiveDisplay = field(default_factory=LiveDisplay)
    content: LiveDisplay = field(default_factory=LiveDisplay)

    def show(self, label: str, bundle: str) -> None:
        """Show a label, and below it a MIME bundle."""
        if label != self.shown[0]:
            self.label.show_text(label)
        if bundle != self.shown[1]:
            content = json.loads(bundle)
            self.content.show(content["data"], content.get("metadata"))
        self.shown = label, bundle


@final
class Displays:
    """All displays with an id, from this cell and earlier cells."""

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[int, str], str] = OrderedDict()
        self._places: OrderedDict[str, dict[int, DisplayPlace]] = OrderedDict()
        """The places of the ranks, by the display's name."""
        self._num_cells = 0
        self._num_generated: Counter[tuple[int, int]] = Counter()
        self.lock = threading.Lock()
        """A lock for callers, because cells in the background show displays too."""

    def begin_cell(self) -> int:
        """Return the number of a new cell.  Each cell numbers the displays without a given id."""
        self._num_cells += 1
        return self._num_cells

    def item(self, rank: int, kind: str, content: Mapping[str, Any], cell: int) -> Item:
        """Return a display as an ``Item``.  Ranks that show the same content get equal items."""
        data = content["data"]
        text = {mime: value for mime, value in data.items() if mime != WIDGET_VIEW}
        bundle = {"data": text or data, "metadata": content.get("metadata")}
        if given := content.get("transient", {}).get("display_id"):
            bundle["name"] = self._name(rank, str(given), cell)
        return kind, json.dumps(bundle, sort_keys=True, default=str)

    def show(self, ranks: Iterable[int], name: str, bundle: str) -> None:
        """Show a display for the first time.  An earlier display with this name stays as it is."""
        new = {rank: DisplayPlace(bundle) for rank in ranks}
        new[min(new)].show(label_of(new), bundle)
        keep(self._places, name, self._places.get(name, {}) | new)

    def update(self, ranks: Iterable[int], name: str, bundle: str) -> None:
        """Replace the content of a display.  If the display's name is unknown, change nothing."""
        if places := self._places.get(name, {}):
            keep(self._places, name, places)
        for rank in places.keys() & set(ranks):
            places[rank].bundle = bundle
        equal: dict[str, list[int]] = {}
        for rank in sorted(places):
            equal.setdefault(places[rank].bundle, []).append(rank)
        for content, (first, *others) in equal.items():
            places[first].show(label_of((first, *others)), content)
            for rank in others:
                places[rank].show("", EMPTY)

    def current(self, rank: int, item: Item) -> Item:
        """Return a rank's item, with the current content if the item is an updated display."""
        kind, text = item
        places = self._places.get(json.loads(text).get("name"), {}) if kind == "display" else {}
        return kind, places[rank].bundle if rank in places else text

    def _name(self, rank: int, given: str, cell: int) -> str:
        """Return a display's id, in a form that is the same on all ranks."""
        if not GENERATED.fullmatch(given):
            return given
        if (name := self._names.get((rank, given))) is None:
            self._num_generated[cell, rank] += 1
            name = f"{cell}-{self._num_generated[cell, rank]}"
        keep(self._names, (rank, given), name)
        return name


def keep(cache: OrderedDict[Any, Any], key: object, value: object) -> None:
    """Store a value in a cache, and forget the values that were stored first."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > MAX_DISPLAYS:
        cache.popitem(last=False)


def label_of(ranks: Iterable[int]) -> str:
    """Return the label of a list of ranks, e.g. ``"[0-3]"``."""
    return f"[{format_ranks(tuple(ranks))}]"
