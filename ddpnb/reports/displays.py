"""Displays with an id, which later output of the ranks can replace (kernel).

Ranks that show the same content share one place.  If a rank then shows different content, ddpnb
moves it to a new place below.  If the contents become equal again, the ranks share one place.
"""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, final

from ddpnb.protocol.notation import format_ranks
from ddpnb.reports.live import WIDGET_VIEW, LiveDisplay
from ddpnb.reports.merging import Item

MAX_DISPLAYS = 1000
"""The number of displays that can still be replaced.  Older displays stay as they are."""

GENERATED = re.compile(r"[0-9a-f]{32}")
"""An id that IPython generated, so it differs between ranks."""

Content = Mapping[str, Any]

NOTHING: tuple[set[int], Content] = (set(), {"data": {"text/plain": ""}})


@dataclass(slots=True)
class Place:
    """A label, and below it the content that one or several ranks share."""

    ranks: set[int] = field(default_factory=set)
    bundle: Content = field(default_factory=dict)
    label: LiveDisplay = field(default_factory=LiveDisplay)
    content: LiveDisplay = field(default_factory=LiveDisplay)

    def show(self, ranks: set[int], bundle: Content) -> None:
        """Show a bundle for some ranks.  Without ranks, clear the place."""
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
        self._num_generated: Counter[int] = Counter()

    def begin_cell(self) -> None:
        """Number the ids that IPython generates from 1 again."""
        self._num_cells += 1
        self._num_generated.clear()

    def item(self, rank: int, kind: str, content: Content) -> Item:
        """Return a display as an item.  Ranks that show the same content have equal items."""
        bundle = {"data": without_widget(content["data"]), "metadata": content.get("metadata")}
        if given := content.get("transient", {}).get("display_id"):
            bundle["name"] = self._name(rank, str(given))
        return kind, json.dumps(bundle, sort_keys=True, default=str)

    def show(self, ranks: Sequence[int], bundle: Content) -> None:
        """Show a display for the first time."""
        places = self._places.setdefault(bundle["name"], [])
        for place in places:
            place.ranks -= set(ranks)  # the content of an earlier display stays
        places[:] = [place for place in places if place.ranks]
        places.append(place := Place())
        place.show(set(ranks), bundle)
        self._places.move_to_end(bundle["name"])
        while len(self._places) > MAX_DISPLAYS:
            self._places.popitem(last=False)

    def update(self, ranks: Sequence[int], bundle: Content) -> None:
        """Replace a display.  If there is none, do nothing, as Jupyter does."""
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
        """Return the item, or its current content if it is a display that was updated."""
        kind, text = item
        places = self._places.get(json.loads(text).get("name"), []) if kind == "display" else []
        bundle = next((place.bundle for place in places if rank in place.ranks), None)
        return (kind, json.dumps(bundle, sort_keys=True)) if bundle else item

    def _name(self, rank: int, given: str) -> str:
        """Return the name that all ranks use for the same display."""
        if not GENERATED.fullmatch(given):
            return given
        if (rank, given) not in self._names:
            self._num_generated[rank] += 1
            self._names[rank, given] = f"{self._num_cells}-{self._num_generated[rank]}"
            while len(self._names) > MAX_DISPLAYS:
                self._names.popitem(last=False)
        self._names.move_to_end((rank, given))
        return self._names[rank, given]


def without_widget(data: Content) -> Content:
    """Return a bundle without the view of a rank's widget, unless it has nothing else."""
    kept = {mime: value for mime, value in data.items() if mime != WIDGET_VIEW}
    return kept or data


def label_of(ranks: Iterable[int]) -> str:
    """Return the label of some ranks, e.g. ``"[0-3]"``."""
    return f"[{format_ranks(tuple(ranks))}]"
