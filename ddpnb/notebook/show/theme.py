"""What does each strategy look like, everywhere?  (Notebook side.)

Colours are matplotlib's ``petroff10`` (M. Petroff, arXiv:2107.02270), chosen to be told
apart with any colour vision; line style and marker say the same once more.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

INK = "#1f2329"
"""Titles and numbers."""
MUTED = "#5b626b"
"""Ticks and notes."""
RULE = "#e3e6ea"
"""Grid lines and the frame."""
PAPER = "#ffffff"
"""The plots' own ground: they look the same in a light and in a dark notebook."""

FONT_POINTS = 13.0
SMALL_POINTS = 11.5
TITLE_POINTS = 15.0


Dashes = Literal["-", "--", "-."]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How one strategy is drawn."""

    colour: str
    ink: str
    """The colour darkened, so that text in it has enough contrast on white."""
    dashes: Dashes
    """A matplotlib line style."""
    marker: str


def _style(colour: str, dashes: Dashes, marker: str) -> Style:
    return Style(colour=colour, ink=_readable(colour), dashes=dashes, marker=marker)


def _scaled(colour: str, factor: float) -> str:
    channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{min(round(channel * factor), 255):02x}" for channel in channels)


def _readable(colour: str) -> str:
    """Return the colour, darkened until its contrast on white is 4.5 (WCAG 2.2, AA)."""
    while contrast_on_white(colour) < 4.5:
        colour = _scaled(colour, 0.96)
    return colour


def contrast_on_white(colour: str) -> float:
    """Return the contrast ratio of a colour on white, 1 to 21, as WCAG defines it."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    luminance = sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 1.05 / (luminance + 0.05)


STYLES: Mapping[str, Style] = {
    "single": _style("#717581", "-", "s"),
    "dp": _style("#e76300", "--", "^"),
    "ddp": _style("#3f90da", "-", "o"),
    "ddp-shm": _style("#3f90da", "--", "h"),
    "ddp-by-hand": _style("#92dadd", "-", "<"),
    "ring-by-hand": _style("#92dadd", "--", ">"),
    "central": _style("#b9ac70", "-", "p"),
    "async": _style("#832db6", "-.", "D"),
    "local-sgd": _style("#a96b59", "-", "X"),
    "diloco": _style("#a96b59", "--", "P"),
    "zero": _style("#ffa90e", "-", "d"),
    "fsdp": _style("#ffa90e", "--", "8"),
    "gossip": _style("#bd1f01", "-.", "v"),
    "no-comm": _style("#94a4a2", "-.", "*"),
    "hogwild": _style("#bd1f01", "-.", "v"),
}
"""The strategies that everybody compares; a strategy added later gets its line here."""

SPARE_STYLES: Sequence[Style] = (
    _style("#ffa90e", "--", "P"),
    _style("#a96b59", "-.", "X"),
    _style("#92dadd", "-", "<"),
    _style("#b9ac70", "--", ">"),
    _style("#94a4a2", "-.", "*"),
)
"""For the names of hand-written loops."""


def style_of(name: str, among: Sequence[str] = (), shade: int = 0) -> Style:
    """Return the style of a strategy or of a hand-written loop.

    Args:
        name: the strategy's or the loop's name.
        among: all names drawn together, so that no two loops look alike while there are
            spare styles; alone, a loop's name always gives the same style.
        shade: 0 for the first comparison drawn; each further one is darker.
    """
    style = STYLES.get(name) or _spare_style(name, among)
    darker = _scaled(style.colour, 0.6**shade)
    return replace(style, colour=darker, ink=_readable(darker))


def _spare_style(name: str, among: Sequence[str]) -> Style:
    taken: dict[str, Style] = {}
    for other in sorted({name, *among} - STYLES.keys()):
        free = [style for style in SPARE_STYLES if style not in taken.values()] or SPARE_STYLES
        taken[other] = free[zlib.crc32(other.encode()) % len(free)]
    return taken[name]
