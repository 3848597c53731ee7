"""Where does each part of the figure go?  (Notebook side.)

Everything is in inches from the lower left; at 100 dots an inch the figure is wide enough
for a projector.  The size is chosen once, before anything is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties

from ddpnb.reports.style import SMALL_POINTS

DPI = 100

WIDTH = 14.0
TOP, BOTTOM = 0.92, 1.06
"""What the title and the panels' heads take; what the ticks, their label and the footer take."""
PANEL_HEIGHT = 2.6
LABEL_HEIGHT = 0.225
"""Inches of one label at the end of a line."""
TICKS_WIDTH = 0.56
"""Inches left of each panel, for the numbers on its y axis."""
LEAST_LABEL_WIDTH = 0.74
"""Inches that there are for a label at least."""
LABEL_CHARACTERS = 26
"""Greatest length of a label; ``cut`` shortens a longer one."""

ROWS_TOP, ROWS_BOTTOM = 1.06, 1.24
"""What the ticks of the panels above and the heads take; what ticks, legend and footer take."""
ROW_HEIGHT, LEAST_ROW_HEIGHT = 0.4, 0.26
MANY_ROWS = 5

Box = tuple[float, float, float, float]
"""Left, bottom, width and height as shares of the figure, as matplotlib takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The size of a figure, and the places in it.

    Args:
        num_strategies: how many there will be.
        has_rows: whether bars stand below the curves.
    """

    num_strategies: int
    has_rows: bool

    @property
    def panel_height(self) -> float:
        """As high as all labels at the lines' ends need."""
        return max(PANEL_HEIGHT, LABEL_HEIGHT * (self.num_strategies + 1))

    @property
    def rows_height(self) -> float:
        """Of all rows together."""
        each = ROW_HEIGHT if self.num_strategies <= MANY_ROWS else LEAST_ROW_HEIGHT
        return max(self.num_strategies * each, 2 * ROW_HEIGHT)

    @property
    def panels_bottom(self) -> float:
        """Where the curves begin."""
        return ROWS_BOTTOM + self.rows_height + ROWS_TOP if self.has_rows else BOTTOM

    @property
    def height(self) -> float:
        """Of the whole figure."""
        return self.panels_bottom + self.panel_height + TOP

    def panels(self, label_width: float, widths: Sequence[float]) -> list[Box]:
        """Return where the curves go, with room at the right of each for its labels.

        Args:
            label_width: inches of the widest label.
            widths: how wide each panel is, as shares of what there is.
        """
        label = 0.3 + label_width
        free = WIDTH - 0.34 - len(widths) * (TICKS_WIDTH + label)
        boxes, left = [], 0.14
        for share in widths:
            left += TICKS_WIDTH
            width = free * share / sum(widths)
            boxes.append(self._box(left, self.panels_bottom, width, self.panel_height))
            left += width + label
        return boxes

    def rows(self, name_width: float, columns: Sequence[tuple[float, float]]) -> list[Box]:
        """Return where the columns go; names stand at the left of the first.

        Args:
            name_width: inches of the widest name.
            columns: how wide each is, as a share of what there is, and how many inches of
                text stand at its right.
        """
        left = self.names_left + 0.4 + name_width
        gap = 0.3
        free = WIDTH - 0.3 - left - sum(text + gap for _, text in columns) + gap
        boxes = []
        for share, text in columns:
            width = free * share / sum(share for share, _ in columns)
            boxes.append(self._box(left, ROWS_BOTTOM, width, self.rows_height))
            left += width + text + gap
        return boxes

    @property
    def names_left(self) -> float:
        """Where the strategies' markers stand."""
        return 0.4

    def row_middle(self, index: int, num_rows: int) -> float:
        """Return how high the middle of a row is, as a share of the figure."""
        return (ROWS_BOTTOM + self.rows_height * (1 - (index + 0.5) / num_rows)) / self.height

    def _box(self, left: float, bottom: float, width: float, height: float) -> Box:
        return (left / WIDTH, bottom / self.height, width / WIDTH, height / self.height)


def cut(label: str) -> str:
    """Return a label that fits the room there is."""
    is_whole = len(label) <= LABEL_CHARACTERS
    return label if is_whole else f"{label[: LABEL_CHARACTERS - 1]}…"


@lru_cache(maxsize=1000)
def width_inches(text: str, *, is_bold: bool = False) -> float:
    """Return how many inches a line of small text takes."""
    look = FontProperties(size=SMALL_POINTS, weight="bold" if is_bold else "normal")
    width, _, _ = _canvas().get_text_width_height_descent(text, look, ismath=False)
    return float(width) / DPI


@cache
def _canvas() -> Any:  # matplotlib leaves its methods untyped
    return RendererAgg(1, 1, DPI)  # type: ignore[no-untyped-call]


def spread_out(
    wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0
) -> list[float]:
    """Return positions at least ``gap`` apart, each as near as can be to the one wanted.

    Neighbours that are too close form a block around the mean of what they want;
    blocks that touch are joined.  Order is kept.  If they cannot all lie between
    ``low`` and ``high``, they are packed evenly there.

    Args:
        wanted: positions, in any order.
        gap: least distance between two positions.
        low: least position.
        high: greatest position.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[list[int]] = []
    starts: list[float] = []
    for index in order:
        blocks.append([index])
        starts.append(_start(blocks[-1], wanted, gap, low, high))
        while len(blocks) > 1 and starts[-2] + gap * len(blocks[-2]) > starts[-1]:
            blocks[-2:] = [blocks[-2] + blocks[-1]]
            starts[-2:] = [_start(blocks[-1], wanted, gap, low, high)]
    placed = [0.0] * len(wanted)
    for block, start in zip(blocks, starts, strict=True):
        for offset, index in enumerate(block):
            placed[index] = start + offset * gap
    return placed


def _start(
    block: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float
) -> float:
    """Return where the block's first label goes, so that the block is near what it wants."""
    length = gap * (len(block) - 1)
    middle = sum(wanted[index] for index in block) / len(block)
    return min(max(middle - length / 2, low), max(high - length, low))
