"""The place of each part of the figure, in inches from the lower left (kernel)."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties

from ddpnb.reports.kit import DPI
from ddpnb.reports.style import SMALL_POINTS

WIDTH = 13.6
"""So wide that text of ``SMALL_POINTS`` is at least 10 pixels high on a laptop of 1280 pixels."""
TOP = 0.8
"""For the title and the heads of the first panels."""
MARGIN, HEAD = 0.17, 0.34
"""Of the paper around the figure; for the heads of further columns."""
PANEL_HEIGHT, PANELS_GAP = 1.95, 0.78
"""The gap is for the ticks of the panels above and the heads of those below."""
LABEL_HEIGHT = 0.225
"""For one label at the end of a line."""
TICKS_WIDTH = 0.56
"""At the left of each panel, for the numbers on its y axis."""
LABEL_CHARACTERS = 26
"""Maximum length of a label; a longer one is shortened."""
ROWS_BOTTOM = 0.86
"""For the ticks and the legend of rows."""
ROW_HEIGHT, LEAST_ROW_HEIGHT, MANY_ROWS = 0.28, 0.24, 5
NAMES_LEFT, NAMES_RIGHT, ROW_GAP = 0.4, 0.4, 0.3
"""Left of the strategies' markers, right of their names, and between columns."""

Place = tuple[float, float]
"""Inches left and right of axes."""


def heights(num_strategies: int) -> tuple[float, float]:
    """Return the height of a panel, with room for all labels, and of the rows of all strategies."""
    row = ROW_HEIGHT if num_strategies <= MANY_ROWS else LEAST_ROW_HEIGHT
    panel = max(PANEL_HEIGHT, LABEL_HEIGHT * (num_strategies + 1))
    return panel, max(num_strategies * row, 2 * ROW_HEIGHT)


def panel_places(num: int, label_width: float) -> list[Place]:
    """Return the places of panels side by side, each with space for labels at its right."""
    whole = (WIDTH - 2 * MARGIN) / num
    lefts = [MARGIN + index * whole + TICKS_WIDTH for index in range(num)]
    return [(left, WIDTH - left - whole + TICKS_WIDTH + 0.3 + label_width) for left in lefts]


def row_places(name_width: float, columns: Sequence[tuple[float, float]]) -> list[Place]:
    """Return the places of columns of rows, with space for names at the left of the first.

    Args:
        name_width: width of the widest name.
        columns: width of each column relative to the others, and inches for the text at its right.
    """
    left = NAMES_LEFT + NAMES_RIGHT + name_width
    free = WIDTH - 2 * MARGIN - left - sum(text + ROW_GAP for _, text in columns) + ROW_GAP
    places = []
    for share, text in columns:
        width = free * share / sum(share for share, _ in columns)
        places.append((left, WIDTH - left - width))
        left += width + text + ROW_GAP
    return places


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
    """Return positions at least ``gap`` apart, whose squared distances to the wanted are least.

    Less the gaps below each, they need only not fall: an isotonic regression, found by its
    max-min formula.  If there is too little space between ``low`` and ``high``, the gap is smaller.

    Args:
        wanted: the wanted positions, in any order.
        gap: least distance between two positions.
        low: least position.
        high: greatest position.
    """
    num = len(wanted)
    gap = min(gap, (high - low) / max(num - 1, 1))
    order, apart = np.argsort(wanted, kind="stable"), gap * np.arange(num)
    sums = np.append(0.0, np.cumsum(np.array(wanted)[order] - apart))
    fitted = []
    for n in range(num):
        ends = np.arange(n + 1, num + 1)
        fitted.append(max(((sums[ends] - sums[at]) / (ends - at)).min() for at in range(n + 1)))
    placed = np.empty(num)
    placed[order] = np.clip(fitted, low, high - gap * (num - 1)) + apart
    return list(map(float, placed))
