"""A prediction as a picture, a table and text (kernel)."""

import io
import math
import textwrap
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ddpnb.protocol.errors import UserError
from ddpnb.reports.export.report import STYLE_SHEET, image_html
from ddpnb.reports.formatting import NOTHING, duration, number, percent, short
from ddpnb.reports.result import PAGE_DPI, Picture
from ddpnb.reports.style import (
    FONT_POINTS,
    INK,
    MUTED,
    PAPER,
    RULE,
    SMALL_POINTS,
    TITLE_POINTS,
    style_of,
)
from ddpnb.reports.table import Cell, Column, Table, table_row
from ddpnb.scaling.model import Point
from ddpnb.scaling.predict import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 13.6, 6.6
LEFT, PLOT_WIDTH, TEXT_LEFT = 0.075, 0.535, 0.64
"""Shares of the width; the assumptions stand to the right."""
TEXT_COLUMNS = 62
"""Characters in a line of the assumptions."""
LINE_INCHES = 0.205
MAX_COLUMNS = 8
"""Numbers of ranks in the table; it says how many more there are."""
ENDINGS = (".html", ".png", ".svg", ".txt")


@final
class PredictionResult:
    """A prediction, shown as a picture and a table; ``prediction`` has its numbers."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction

    def table(self) -> Table:
        """Return one row per strategy: throughput, step and efficiency at each number of ranks."""
        return prediction_table(self.prediction)

    def plot(self) -> Picture:
        """Return the picture."""
        return Picture(draw(self.prediction), sentence(self.prediction))

    def sentence(self) -> str:
        """Return where each strategy stops scaling, as one sentence."""
        return sentence(self.prediction)

    def save(self, path: Path | str) -> Path:
        """Write it as ``.html`` (self-contained), ``.png``, ``.svg`` or ``.txt``; return the path.

        Raises:
            UserError: the ending is another, or the file cannot be written.
        """
        target = Path(path)
        if target.suffix not in ENDINGS:
            raise UserError(f"{target.name}: a prediction is saved as {', '.join(ENDINGS)}.")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._content(target.suffix))
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error}.") from error
        return target

    def __repr__(self) -> str:
        return f"{self.table().text()}\n\n{self.sentence()}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return picture and table together, and each alone as a fallback."""
        png = self.plot().png()
        return {"text/plain": repr(self), "text/html": self._html(png), "image/png": png}

    def _html(self, png: bytes) -> str:
        picture = image_html(png, self.sentence())
        return f"{picture}{self.table().html()}<p>{escape(self.sentence())}</p>"

    def _content(self, ending: str) -> bytes:
        if ending == ".txt":
            return f"{self!r}\n".encode()
        if ending == ".svg":
            buffer = io.BytesIO()
            self.plot().figure.savefig(buffer, format="svg")
            return buffer.getvalue()
        png = self.plot().png(PAGE_DPI)
        if ending == ".png":
            return png
        title = escape(heading(self.prediction))
        page = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{title}</title><style>{STYLE_SHEET}</style></head>\n"
            f"<body><h1>{title}</h1>{self._html(png)}</body></html>\n"
        )
        return page.encode()


def heading(prediction: Prediction) -> str:
    """Return the title."""
    devices = f", from {prediction.devices}" if prediction.devices else ""
    return f"Predicted: {prediction.title}{devices}"


def sentence(prediction: Prediction) -> str:
    """Return where each strategy stops scaling, and what holds it up."""
    parts = []
    for name, stop in prediction.stops.items():
        held = prediction.limits[name]
        if stop is None:
            parts.append(f"{name} scales to {prediction.searched:,} ranks and more")
        elif stop == 1:
            parts.append(f"{name} gains nothing from a second rank ({held})")
        else:
            parts.append(f"{name} stops scaling at about {stop:,} ranks ({held})")
    return f"Predicted, not measured: {'; '.join(parts)}."


def prediction_table(prediction: Prediction) -> Table:
    """Return one row per strategy, and one column per number of ranks."""
    shown = prediction.ranks[:MAX_COLUMNS]
    rows = []
    for name, points in prediction.points.items():
        at = {each.num_ranks: each for each in points}
        times = dict(zip(at, prediction.seconds_to_target.get(name, ()), strict=False))
        cells = [_cell(at.get(n), times.get(n)) for n in shown]
        stop = prediction.stops[name]
        stops = f"> {prediction.searched:,}" if stop is None else f"{stop:,}"
        head = Cell(text=name, dot=style_of(name, tuple(prediction.points)).colour)
        rows.append(table_row(head, *cells, Cell(text=stops), prediction.limits[name]))
    more = len(prediction.ranks) - len(shown)
    notes = [
        "Of each: samples/s, then the step and the efficiency against one rank alone"
        + (", then the time to the target." if prediction.seconds_to_target else ".")
    ]
    if more:
        notes.append(f"{more} of the numbers of ranks are left out here: the picture has them.")
    notes.append(
        "It stops scaling where twice as many ranks bring less than a tenth more throughput."
    )
    ranks = [Column(title=f"{n:,} rank{'' if n == 1 else 's'}", is_number=True) for n in shown]
    return Table(
        caption=heading(prediction),
        columns=(
            Column(title="strategy"),
            *ranks,
            Column(title="stops at", is_number=True),
            Column(title="held up by"),
        ),
        rows=tuple(rows),
        notes=(*notes, *prediction.assumptions),
    )


def _cell(found: Point | None, seconds: float | None) -> Cell:
    if found is None:
        return Cell(text=NOTHING)
    quiet = f"{_time(found.step_seconds)}, {percent(found.efficiency)}"
    if seconds is not None:
        quiet += f", {duration(seconds)}"
    return Cell(text=short(found.samples_per_second), quiet=quiet)


def _time(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms" if seconds < 1 else f"{number(seconds)} s"


# -- the picture ---------------------------------------------------------------------------


def draw(prediction: Prediction) -> "Figure":
    """Return throughput over ranks, both logarithmic, with every assumption beside it."""
    from matplotlib.figure import Figure  # noqa: PLC0415  takes 0.3 s

    limits, assumptions = _limits(prediction), prediction.assumptions
    if prediction.roof and min(rate for _, rate in prediction.roof) >= limits[1]:
        assumptions = (*assumptions, "The roof of the link's bytes alone lies above the picture.")
    lines = _wrapped(assumptions)
    num_labels = 3 + len(prediction.points) + len(prediction.measured)
    height = max(HEIGHT, 1.9 + LINE_INCHES * (len(lines) + 1 + 1.3 * math.ceil(num_labels / 2)))
    figure = Figure(figsize=(WIDTH, height), dpi=100, facecolor=PAPER)
    figure.text(
        0.02,
        1 - 0.42 / height,
        heading(prediction),
        fontsize=TITLE_POINTS,
        color=INK,
        weight="bold",
    )
    axes = figure.add_axes((LEFT, 0.8 / height, PLOT_WIDTH, 1 - 1.85 / height))
    _draw_bounds(axes, prediction, limits)
    _draw_strategies(axes, prediction)
    _dress(axes, limits, "emulated" if prediction.devices else "measured")
    _write_assumptions(figure, lines, height)
    figure.legend(
        loc="lower left",
        bbox_to_anchor=(TEXT_LEFT - 0.01, 0.2 / height),
        ncols=2,
        fontsize=SMALL_POINTS - 2,
        labelcolor=INK,
        frameon=False,
    )
    return figure


def _limits(prediction: Prediction) -> tuple[float, float]:
    """Return the ends of the axis of throughput: all strategies are seen, not all bounds."""
    rates = [each.samples_per_second for line in prediction.lines.values() for each in line]
    rates += [each.samples_per_second for each in prediction.measured]
    return min(rates) / 2, min(max(rate for _, rate in prediction.ideal) * 2, max(rates) * 12)


def _draw_bounds(axes: "Axes", prediction: Prediction, limits: tuple[float, float]) -> None:
    looks = (
        (prediction.ideal, "ideal: N times one rank", "-", 1.2),
        (prediction.amdahl, "Amdahl: a step's fixed cost", (0, (5, 2)), 1.4),
        (prediction.roof, "roof: the link's bytes alone", (0, (1, 1.2)), 1.8),
    )
    for line, label, dashes, width in looks:
        found = [(n, rate) for n, rate in line if rate < 1e14]
        if any(rate < limits[1] for _, rate in found):
            axes.plot(
                *zip(*found, strict=True),
                color=MUTED,
                linestyle=dashes,
                linewidth=width,
                label=label,
                zorder=1.5,
            )


def _draw_strategies(axes: "Axes", prediction: Prediction) -> None:
    names = tuple(prediction.points)
    for name in names:
        style, line = style_of(name, names), prediction.lines[name]
        axes.plot(
            [each.num_ranks for each in line],
            [each.samples_per_second for each in line],
            color=style.colour,
            linestyle=style.dashes,
            linewidth=2.2,
            label=name,
            zorder=2.5,
        )
        points = prediction.points[name]
        axes.plot(
            [each.num_ranks for each in points],
            [each.samples_per_second for each in points],
            linestyle="none",
            marker=style.marker,
            markersize=7,
            markerfacecolor=PAPER,
            markeredgecolor=style.colour,
            markeredgewidth=1.6,
            zorder=3,
        )
    seen = tuple(dict.fromkeys(each.strategy for each in prediction.measured))
    for each in prediction.measured:
        style = style_of(each.strategy, seen)
        axes.plot(
            [each.num_ranks],
            [each.samples_per_second],
            linestyle="none",
            marker=style.marker,
            markersize=10,
            markerfacecolor=style.colour,
            markeredgecolor=INK,
            markeredgewidth=1.2,
            label=f"{'emulated' if prediction.devices else 'measured here'}: {each.strategy}",
            zorder=4,
        )


def _dress(axes: "Axes", limits: tuple[float, float], filled: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: PLC0415  as above

    from ddpnb.reports.figures.axes import tick  # noqa: PLC0415  as above

    axes.set_facecolor("none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    axes.set_xlabel("ranks", fontsize=SMALL_POINTS, color=MUTED)
    axes.set_title(
        f"Samples per second (filled: {filled}; hollow: predicted)",
        loc="left",
        fontsize=SMALL_POINTS,
        color=INK,
    )
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    axes.grid(color=RULE, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=MUTED, color=MUTED)


def _write_assumptions(figure: "Figure", lines: list[str], height: float) -> None:
    top = 1 - 0.95 / height
    figure.text(TEXT_LEFT, top, "Assumed", fontsize=FONT_POINTS, color=INK, weight="bold")
    for index, line in enumerate(lines, start=1):
        figure.text(
            TEXT_LEFT,
            top - (0.06 + LINE_INCHES * index) / height,
            line,
            fontsize=SMALL_POINTS - 2,
            color=MUTED,
        )


def _wrapped(assumptions: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for each in assumptions:
        lines += textwrap.wrap(each, TEXT_COLUMNS, initial_indent="• ", subsequent_indent="   ")
    return lines
