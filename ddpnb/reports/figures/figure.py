"""The figure of a comparison, live and from the store (kernel).

One figure is kept and redrawn from snapshots; without pyplot, none leaks.
"""

import io
import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from PIL import Image

from ddpnb.history.comparison import Comparison
from ddpnb.history.summary import StrategySummary, evaluations
from ddpnb.reports import formatting
from ddpnb.reports.figures.axes import planned_samples, planned_seconds
from ddpnb.reports.figures.columns import Detail, has_detail, memory_differs
from ddpnb.reports.figures.layout import (
    DPI,
    LEAST_LABEL_WIDTH,
    WIDTH,
    Layout,
    shortened,
    width_inches,
)
from ddpnb.reports.figures.panels import CurvePanel, LabelledLine
from ddpnb.reports.figures.series import Preparer, Series
from ddpnb.reports.style import (
    EVERYTHING,
    INK,
    MUTED,
    PAPER,
    RULE,
    SMALL_POINTS,
    TITLE_POINTS,
    PlotOptions,
)

MOST_HELD_OUT = 3
"""Panels in the lower row: accuracy before loss."""
FOOTER_INCHES = WIDTH - 0.7
MORE = "more below the table"
CLEAR = 255
"""The last index of a palette of 256 colours."""
X_LABELS = {
    "samples": "samples seen",
    "seconds": "training seconds",
    "updates": "updates",
}


def draw(comparison: Comparison, options: PlotOptions = EVERYTHING) -> Figure:
    """Return a comparison as a matplotlib figure."""
    return LiveFigure(comparison, options).finish()


@final
class LiveFigure:
    """Curves above, bars below, redrawn in place.

    Not thread-safe.

    Args:
        comparison: decides on the size.
        options: what to show of it.
    """

    def __init__(self, comparison: Comparison, options: PlotOptions = EVERYTHING) -> None:
        self._preparer = Preparer(options.y)
        planned = {(comparison.name, spec.strategy) for spec in comparison.specs}
        begun = {(run.comparison, run.name) for run in comparison.runs}
        held_out = held_out_measures(comparison)
        self._layout = Layout(
            num_strategies=len(planned | begun),
            has_rows=has_detail(comparison),
            num_curve_rows=2 if held_out else 1,
        )
        self._figure = Figure(figsize=(WIDTH, self._layout.height), dpi=DPI, facecolor="none")
        self._canvas: Any = FigureCanvasAgg(self._figure)  # matplotlib leaves its methods untyped
        self._background: Any = None
        self._figure.add_artist(_paper(self._figure, self._layout.height))
        self._title = self._text(self._layout.height - 0.38, TITLE_POINTS, INK)
        self._footer = self._text(0.3, SMALL_POINTS, MUTED)
        across = (options.x,) if options.x else ("samples", "seconds")
        self._losses = {
            x: CurvePanel(
                self._figure.add_axes((0, 0, 1, 1)),
                title=f"{options.y or 'Training loss'} by {'time' if x == 'seconds' else x}",
                x_label=X_LABELS[x],
                log=options.log,
                target=_marked(options, is_accuracy=False),
                awaited=options.y or "the first steps",
            )
            for x in across
        }
        self._rate = CurvePanel(
            self._figure.add_axes((0, 0, 1, 1)),
            title="Samples per second",
            x_label=X_LABELS["seconds"],
            names_marks=True,
        )
        timed = [x for x in across if x != "updates"] or ["samples"]
        shown = [(y, x) for y in held_out for x in timed]
        self._held_out = {
            (y, x): CurvePanel(
                self._figure.add_axes((0, 0, 1, 1)),
                title=f"Held-out {y} by {'time' if x == 'seconds' else x}",
                x_label=X_LABELS[x],
                log=options.log and y == "loss",
                target=_marked(options, is_accuracy=True) if y == "accuracy" else None,
                is_share=y == "accuracy",
            )
            for y, x in shown[:MOST_HELD_OUT]
        }
        self._detail = (
            Detail(self._figure, self._layout, comparison) if self._layout.has_rows else None
        )
        self._room = (0.0, 0.0)
        self._seconds = 0.0
        self._is_live = False
        self.update(comparison)

    def lacks_panels(self, comparison: Comparison) -> bool:
        """Return whether a comparison has curves or columns that the figure has no room for."""
        has_memory = self._detail is None or self._detail.has_memory
        lacks_memory = not has_memory and memory_differs(comparison)
        return lacks_memory or (not self._held_out and bool(held_out_measures(comparison)))

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        series = self._preparer.series_of(comparison)
        self._is_live = any(each.is_live for each in series)
        begun = {each.summary.name for each in series}
        to_come = [
            formatting.longest_label(name) for name in comparison.strategies if name not in begun
        ]
        self._make_room(
            [shortened(label) for label in [*(each.label for each in series), *to_come]]
        )
        self._seconds = planned_seconds(comparison, self._seconds)
        ends = {"samples": planned_samples(comparison), "seconds": self._seconds}
        for x, panel in self._losses.items():
            lines = [LabelledLine(each, each.losses[x], _marks(each, x)) for each in series]
            panel.update(lines, ends.get(x, 0.0))
        for (y, x), panel in self._held_out.items():
            lines = [
                LabelledLine(each, each.held_out[y, x])
                for each in series
                if len(each.held_out[y, x].y)
            ]
            panel.update(lines, ends[x])
        self._rate.update(
            [LabelledLine(each, each.throughput, _marks(each, "seconds")) for each in series],
            self._seconds,
        )
        if self._detail is not None:
            self._detail.update(comparison, series, self._seconds)
        self._title.set_text(formatting.title(comparison))
        self._footer.set_text(footer(comparison, tuple(each.summary for each in series)))

    def png(self) -> bytes:
        """Return the figure as it is now, transparent around its round corners.

        Only what changes while a run trains is drawn each time.
        """
        with rc_context({"text.hinting": "no_hinting"}):  # saves a quarter of the drawing
            if self._figure.stale:
                self._canvas.draw()
                self._background = self._canvas.copy_from_bbox(self._figure.bbox)
            self._canvas.restore_region(self._background)
            for artist in self._artists():
                if artist.get_animated():
                    artist.draw(self._canvas.get_renderer())
        image = Image.fromarray(np.asarray(self._canvas.buffer_rgba()))
        buffer = io.BytesIO()
        if self._is_live:  # quicker to encode
            _in_256_colours(image).save(buffer, "png", compress_level=1, transparency=CLEAR)
        else:
            image.save(buffer, "png", compress_level=1)
        return buffer.getvalue()

    def finish(self) -> Figure:
        """Return the matplotlib figure; no update may follow."""
        for artist in self._artists():
            artist.set_animated(False)
        return self._figure

    def _artists(self) -> list[Artist]:
        """Return the artists that may change at an update, from back to front."""
        parts: list[CurvePanel | Detail] = [*self._panels()]
        parts += [self._detail] if self._detail else []
        return [artist for part in parts for artist in part.artists()]

    def __repr__(self) -> str:
        return self._title.get_text()

    def _make_room(self, labels: Sequence[str]) -> None:
        """Place the panels so that the widest label so far fits."""
        label = max(LEAST_LABEL_WIDTH, self._room[0], *map(width_inches, labels))
        bold = max(
            LEAST_LABEL_WIDTH, self._room[1], *(width_inches(t, is_bold=True) for t in labels)
        )
        if (label, bold) == self._room:
            return
        self._room = (label, bold)
        widths = (2.0, 1.0) if len(self._losses) == 1 else (1.0, 1.0, 1.0)
        upper = (*self._losses.values(), self._rate)
        for row, panels in enumerate((upper, tuple(self._held_out.values()))):
            boxes = self._layout.panels(label, widths, row)
            for panel, box in zip(panels, boxes, strict=False):
                panel.axes.set_position(box)
        if self._detail is not None:
            self._detail.make_room(bold)

    def _panels(self) -> tuple[CurvePanel, ...]:
        return (*self._losses.values(), self._rate, *self._held_out.values())

    def _text(self, inches_up: float, points: float, colour: str) -> Text:
        return self._figure.text(
            0.3 / WIDTH,
            inches_up / self._layout.height,
            "",
            fontsize=points,
            color=colour,
            weight="bold" if points == TITLE_POINTS else "normal",
            va="center",
        )


def held_out_measures(comparison: Comparison) -> tuple[str, ...]:
    """Return what held-out curves show, ``"accuracy"`` before ``"loss"``; empty without any."""
    found = [each for run in comparison.runs for each in evaluations(run)]
    measures = {"accuracy": [e.accuracy for e in found], "loss": [e.loss for e in found]}
    return tuple(name for name, values in measures.items() if any(map(math.isfinite, values)))


def _marked(options: PlotOptions, *, is_accuracy: bool) -> float | None:
    """Return the height of the target in panels of the one or of the other kind."""
    target = options.target
    if target is None or target.is_accuracy != is_accuracy or (options.y and not is_accuracy):
        return None
    return target.value


def footer(comparison: Comparison, summaries: tuple[StrategySummary, ...]) -> str:
    """Return what the lines mean, and as many whole notes as fit in one line."""
    repeats = max((run.repeat for run in comparison.runs), default=0) > 0
    faint, strong = ("each repeat", "median") if repeats else ("every update", "moving average")
    text, shown = f"Faint: {faint}; strong: {strong}.", ""
    notes = [note.rstrip(".") for note in formatting.notes(comparison, summaries)]
    for index, note in enumerate(notes):
        longer = f"{shown}; {note}" if shown else f" {note}"
        rest = "" if index == len(notes) - 1 else f"; {MORE}"
        if width_inches(text + longer + rest) > FOOTER_INCHES:
            return f"{text}{shown}; {MORE}" if shown else f"{text} {MORE.capitalize()}"
        shown = longer
    return text + shown


def _in_256_colours(image: Image.Image) -> Image.Image:
    """Return an image with a palette, in which ``CLEAR`` stands for its clear pixels."""
    frame = image.convert("RGB").quantize(
        CLEAR, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )
    frame.putpalette([*(frame.getpalette() or [])[: 3 * CLEAR], 255, 255, 255])
    frame.paste(CLEAR, mask=image.getchannel("A").point([255] + [0] * 255))
    return frame


def _marks(series: Series, x: str) -> tuple[tuple[float, str], ...]:
    """Return the places of a series' marks on an axis, without those set before the first step."""
    if x == "updates":
        return ()
    return tuple(
        (samples if x == "samples" else mark.seconds, f"rank {mark.rank}: {mark.text}")
        for mark, samples in series.marks
        if mark.seconds > 0
    )


def _paper(figure: Figure, height: float) -> FancyBboxPatch:
    """Return the white background, which suits a light and a dark notebook."""
    return FancyBboxPatch(
        (0.17, 0.17),
        WIDTH - 0.34,
        height - 0.34,
        boxstyle="round,pad=0.15,rounding_size=0.18",
        facecolor=PAPER,
        edgecolor=RULE,
        linewidth=1.2,
        zorder=-1,
        transform=figure.dpi_scale_trans,
    )
