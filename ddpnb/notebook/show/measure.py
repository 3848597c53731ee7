"""How wide is a text that is drawn?  (Notebook side.)"""

from functools import cache, lru_cache
from typing import Any

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties

from ddpnb.notebook.show.theme import SMALL_POINTS

DPI = 100


@lru_cache(maxsize=1000)
def width_inches(text: str, *, is_bold: bool = False) -> float:
    """Return how many inches a line of small text takes."""
    look = FontProperties(size=SMALL_POINTS, weight="bold" if is_bold else "normal")
    width, _, _ = _canvas().get_text_width_height_descent(text, look, ismath=False)
    return float(width) / DPI


@cache
def _canvas() -> Any:  # matplotlib leaves its methods untyped
    return RendererAgg(1, 1, DPI)  # type: ignore[no-untyped-call]
