"""The style of figures: the user's options, and the look of each strategy.  Runs in the kernel.

``catalogue.STRATEGIES`` defines the colour, line and marker of each built-in strategy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpnb.protocol.catalogue import STRATEGIES, Dashes, Style
from ddpnb.protocol.notation import Target, parse_target
from ddpnb.protocol.options import check_options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """Options for the figure of a comparison."""

    log: bool = option(False, "draw losses on a logarithmic axis")
    target: Target | None = option(
        None,
        "show when each run reaches this training loss, or this held-out accuracy (accuracy=0.95)",
        from_text=parse_target,
        example="LOSS",
    )
    panels: str = option(
        "", "draw every panel, not only the most important panels", choices=("all",), example="all"
    )

    def __post_init__(self) -> None:
        check_options(self)


EVERYTHING = PlotOptions()
"""The default options."""

INK = "#1f2329"
"""The colour of titles and numbers."""
MUTED = "#5b626b"
"""The colour of ticks and notes."""
RULE = "#e3e6ea"
"""The colour of grid lines and the frame."""
PAPER = "#ffffff"
"""The background colour of figures, both in light and in dark notebooks."""

PART_COLOURS = {
    "data": "#d9c7b8",
    "forward": "#9fb4c7",
    "backward": "#5f7f9c",
    "optimizer": "#c3c9a8",
    "communication": "#d1495b",
    "waiting": "#edae49",
}
"""Colours of the parts of a step, in their order.  Communication and waiting have warm colours."""

MEMORY_COLOURS = {
    "parameters": "#4a7c6f",
    "gradients": "#9cc5b5",
    "optimizer": "#cdb65a",
    "activations": "#b79cbd",
}
"""Colours of the parts of a rank's memory."""

FONT_POINTS = 13.0
SMALL_POINTS = 12.0
TINY_POINTS = 9.5
TITLE_POINTS = 15.0

LINES: Mapping[Dashes, str | tuple[float, tuple[float, ...]]] = {
    "solid": "-",
    "dashed": "--",
    "dash-dot": "-.",
    "long": (0, (7.0, 2.0)),
    "dotted": (0, (1.0, 1.1)),
    "dash-dot-dot": (0, (5.0, 1.4, 1.0, 1.4, 1.0, 1.4)),
    "long-short": (0, (6.0, 1.6, 2.6, 1.6)),
}
"""Matplotlib's line style for each kind of dashes."""


def ink_of(style: Style) -> str:
    """Return a strategy's text colour: dark enough for a contrast of 4.5 (WCAG 2.2, level AA)."""
    colour = style.colour
    while contrast_on_white(colour) < 4.5:
        colour = _darkened(colour, 0.96)
    return colour


def _darkened(colour: str, factor: float) -> str:
    channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(channel * factor):02x}" for channel in channels)


def contrast_on_white(colour: str) -> float:
    """Return WCAG's contrast ratio of a colour on white, a number from 1 to 21."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    luminance = sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 1.05 / (luminance + 0.05)


SPARE_STYLES: Sequence[Style] = (
    Style("#2b7a3d", "solid", "P"),
    Style("#c2528b", "dashed", "X"),
    Style("#1f3a93", "dash-dot", "v"),
    Style("#7a8b00", "long", "^"),
    Style("#6b3410", "dash-dot-dot", "<"),
    Style("#128a8a", "long-short", ">"),
)
"""Styles for hand-written loops, and for strategies that users define as classes."""


def style_of(name: str, among: Sequence[str] = (), shade: int = 0) -> Style:
    """Return the style of a strategy, a variant of a strategy, or a hand-written loop.

    Args:
        name: the name of the strategy, variant (``"ddp:hook=fp16"``) or loop.
        among: all names in the figure.  Loops and variants get different styles if there are
            enough styles.
        shade: number of the comparison in the figure, from 0.  Later comparisons are darker.
    """
    base, _, options = name.partition(":")
    if base in STRATEGIES:
        style = STRATEGIES[base].look
    else:
        bases = {other.partition(":")[0] for other in (name, *among)} - STRATEGIES.keys()
        style = SPARE_STYLES[sorted(bases).index(base) % len(SPARE_STYLES)]
    if options:  # give each variant of a strategy different dashes
        family = sorted({other for other in (name, *among) if other.startswith(f"{base}:")})
        free = [dashes for dashes in LINES if dashes not in ("solid", style.dashes)]
        style = style._replace(dashes=free[family.index(name) % len(free)], is_hollow=True)
    return style._replace(colour=_darkened(style.colour, 0.6**shade))
