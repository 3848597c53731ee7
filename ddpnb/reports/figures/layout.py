"""The place of each part of the figure, in inches from the lower left (kernel).

The size is chosen once, before anything is drawn.
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
"""For the title and the panels' heads; for the ticks, their label and the footer."""
PANEL_HEIGHT = 2.6
PANELS_GAP = 1.16
"""Between two rows of panels: for the ticks of the upper and the heads of the lower."""
LABEL_HEIGHT = 0.225
"""Inches for one label at the end of a line."""
TICKS_WIDTH = 0.56
"""Inches at the left of each panel, for the numbers on its y axis."""
LEAST_LABEL_WIDTH = 0.74
"""Least inches for a label."""
LABEL_CHARACTERS = 26
"""Maximum length of a label; a longer one is shortened."""

ROWS_TOP, ROWS_BOTTOM = 1.06, 1.24
"""For the ticks of the panels above and the heads; for ticks, legend and footer."""
ROW_HEIGHT, LEAST_ROW_HEIGHT = 0.4, 0.26
MANY_ROWS = 5
NAMES_LEFT = 0.4
"""For the strategies' markers."""

Box = tuple[float, float, float, float]
"""Left, bottom, width and height as shares of the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The size of a figure, and the places in it.

    Args:
        num_strategies: the number of strategies that there will be.
        has_rows: whether there are rows below the curves.
        num_curve_rows: rows of panels with curves.
    """

    num_strategies: int
    has_rows: bool
    num_curve_rows: int = 1

    @property
    def panel_height(self) -> float:
        """Enough for all labels at the ends of lines."""
        return max(PANEL_HEIGHT, LABEL_HEIGHT * (self.num_strategies + 1))

    @property
    def rows_height(self) -> float:
        """The height of all rows together."""
        each = ROW_HEIGHT if self.num_strategies <= MANY_ROWS else LEAST_ROW_HEIGHT
        return max(self.num_strategies * each, 2 * ROW_HEIGHT)

    @property
    def panels_bottom(self) -> float:
        """The lower end of the curves."""
        return ROWS_BOTTOM + self.rows_height + ROWS_TOP if self.has_rows else BOTTOM

    @property
    def height(self) -> float:
        """The height of the whole figure."""
        num = self.num_curve_rows
        return self.panels_bottom + num * self.panel_height + (num - 1) * PANELS_GAP + TOP

    def panels(self, label_width: float, widths: Sequence[float], row: int = 0) -> list[Box]:
        """Return the places of the panels, with space for labels at the right of each.

        Args:
            label_width: width of the widest label in inches.
            widths: width of each panel, relative to the others.
            row: 0 for the uppermost.
        """
        label = 0.3 + label_width
        rows_below = self.num_curve_rows - 1 - row
        bottom = self.panels_bottom + rows_below * (self.panel_height + PANELS_GAP)
        free = WIDTH - 0.34 - len(widths) * (TICKS_WIDTH + label)
        boxes, left = [], 0.14
        for share in widths:
            left += TICKS_WIDTH
            width = free * share / sum(widths)
            boxes.append(self._box(left, bottom, width, self.panel_height))
            left += width + label
        return boxes

    def rows(self, name_width: float, columns: Sequence[tuple[float, float]]) -> list[Box]:
        """Return the places of the columns, with space for names at the left of the first.

        Args:
            name_width: width of the widest name in inches.
            columns: width of each column, relative to the others, and inches for the text at
                its right.
        """
        left = NAMES_LEFT + 0.4 + name_width
        gap = 0.3
        free = WIDTH - 0.3 - left - sum(text + gap for _, text in columns) + gap
        boxes = []
        for share, text in columns:
            width = free * share / sum(share for share, _ in columns)
            boxes.append(self._box(left, ROWS_BOTTOM, width, self.rows_height))
            left += width + text + gap
        return boxes

    def row_middle(self, index: int, num_rows: int) -> float:
        """Return the height of the middle of a row, as a share of the figure."""
        return (ROWS_BOTTOM + self.rows_height * (1 - (index + 0.5) / num_rows)) / self.height

    def _box(self, left: float, bottom: float, width: float, height: float) -> Box:
        return (left / WIDTH, bottom / self.height, width / WIDTH, height / self.height)


def shortened(label: str) -> str:
    """Return a label of at most ``LABEL_CHARACTERS``."""
    is_whole = len(label) <= LABEL_CHARACTERS
    return label if is_whole else f"{label[: LABEL_CHARACTERS - 1]}…"


@lru_cache(maxsize=1000)
def width_inches(text: str, *, is_bold: bool = False) -> float:
    """Return the width of a line of small text in inches."""
    look = FontProperties(size=SMALL_POINTS, weight="bold" if is_bold else "normal")
    width, _, _ = _canvas().get_text_width_height_descent(text, look, ismath=False)
    return float(width) / DPI


@cache
def _canvas() -> Any:  # matplotlib leaves its methods untyped
    return RendererAgg(1, 1, DPI)  # type: ignore[no-untyped-call]


def spread_out(
    wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0
) -> list[float]:
    """Return positions at least ``gap`` apart, each as near as possible to its wanted one.

    Neighbours that are too close form a block around the mean of their wanted positions; blocks
    that touch are joined.  Order is kept.  If there is too little space between ``low`` and
    ``high``, the gap is smaller.

    Args:
        wanted: the wanted positions, in any order.
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
    """Return the position of the block's first label, so that its mean is as wanted."""
    length = gap * (len(block) - 1)
    middle = sum(wanted[index] for index in block) / len(block)
    return min(max(middle - length / 2, low), max(high - length, low))
