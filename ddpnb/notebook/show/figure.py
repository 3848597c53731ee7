"""How is a comparison drawn, live and from the store?  (Notebook side.)

One kept figure, redrawn in place from a snapshot; no pyplot, so none leaks.
"""

from typing import final

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from ddpnb.notebook.record.comparison import Comparison
from ddpnb.notebook.record.runs import RunSnapshot
from ddpnb.notebook.record.summary import summarise
from ddpnb.notebook.show import words
from ddpnb.notebook.show.canvas import QuickCanvas
from ddpnb.notebook.show.panel import Labelled, Panel
from ddpnb.notebook.show.series import Drawn, Line, Series, prepare, series_of
from ddpnb.notebook.show.theme import INK, MUTED, PAPER, RULE, SMALL_POINTS, TITLE_POINTS

WIDTH, HEIGHT = 14.0, 4.7
"""Inches; at 100 dots an inch wide enough for a projector."""
PANEL_BOTTOM, PANEL_HEIGHT = 1.12, 2.54
TICKS_WIDTH = 0.56
"""Inches left of each panel, for the numbers on its y axis."""
CHARACTER_WIDTH = 0.087
"""Inches of one character of a label, generously."""
LABEL_CHARACTERS = (13, 26)
"""Least and greatest length of a label that there is room for."""
FOOTER_CHARACTERS = 150


def draw(comparison: Comparison) -> Figure:
    """Return the figure of a comparison, to be saved by matplotlib's own means."""
    live = LiveFigure()
    live.update(comparison)
    return live.finish()


@final
class LiveFigure:
    """Loss against samples, loss against seconds and throughput, redrawn in place.

    One thread at a time.
    """

    def __init__(self) -> None:
        self._figure = Figure(figsize=(WIDTH, HEIGHT), dpi=100, facecolor="none")
        self._canvas = QuickCanvas(self._figure)
        self._figure.add_artist(_paper(self._figure))
        self._title = _text(self._figure, HEIGHT - 0.4, TITLE_POINTS, INK)
        self._footer = _text(self._figure, 0.3, SMALL_POINTS, MUTED)
        self._samples = self._panel("Training loss by samples", "samples seen")
        self._seconds = self._panel("Training loss by time", "training seconds")
        self._rate = self._panel("Samples per second", "training seconds")
        self._room = 0
        self._kept: dict[str, tuple[tuple[int, str], Drawn]] = {}

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        series = series_of(comparison, self._drawn)
        self._make_room(max((len(each.label) for each in series), default=0))
        planned = max((run.header.num_samples for run in comparison.runs if run.header), default=0)
        self._samples.update([_labelled(each, each.by_samples) for each in series], planned)
        self._seconds.update([_labelled(each, each.by_seconds) for each in series])
        self._rate.update([_rate_labelled(each) for each in series])
        self._title.set_text(words.title(comparison))
        self._footer.set_text(_footer(comparison))

    def png(self) -> bytes:
        """Return the figure as it is now, with round corners on nothing."""
        panels = self._panels()
        still = (
            self._room,
            self._title.get_text(),
            self._footer.get_text(),
            *(p.limits() for p in panels),
        )
        return self._canvas.png([artist for p in panels for artist in p.moving()], still)

    def finish(self) -> Figure:
        """Return the figure for saving by matplotlib's own means; it is live no more."""
        for panel in self._panels():
            for artist in panel.moving():
                artist.set_animated(False)
        return self._figure

    def __repr__(self) -> str:
        return self._title.get_text() or "a figure that waits for its first run"

    def _repr_png_(self) -> bytes:
        return self.png()

    def _panel(self, title: str, x_label: str) -> Panel:
        return Panel(self._figure.add_axes((0, 0, 1, 1)), title=title, x_label=x_label)

    def _make_room(self, num_characters: int) -> None:
        """Place the panels so that the longest label fits; they never grow back."""
        least, most = LABEL_CHARACTERS
        room = max(self._room, min(max(num_characters, least), most))
        if room != self._room:
            self._room = room
            for panel, where in zip(self._panels(), _places(room), strict=True):
                panel.axes.set_position(where)

    def _panels(self) -> tuple[Panel, Panel, Panel]:
        return self._samples, self._seconds, self._rate

    def _drawn(self, run: RunSnapshot) -> Drawn:
        """Prepare a run only if something has come since the last time."""
        state = (len(run.events), run.status)
        known = self._kept.get(run.run_id)
        if known is None or known[0] != state:
            known = (state, prepare(run))
            self._kept[run.run_id] = known
        return known[1]


def _places(num_characters: int) -> list[tuple[float, float, float, float]]:
    """Return where the three panels go, as shares of the figure."""
    label = 0.24 + CHARACTER_WIDTH * num_characters
    rate = CHARACTER_WIDTH * 6
    width = (WIDTH - 0.3 - rate) / 3 - TICKS_WIDTH - label
    lefts = [0.14 + TICKS_WIDTH + index * (TICKS_WIDTH + width + label) for index in range(3)]
    return [
        (left / WIDTH, PANEL_BOTTOM / HEIGHT, width / WIDTH, PANEL_HEIGHT / HEIGHT)
        for left in lefts
    ]


def _labelled(series: Series, line: Line, before: str = "") -> Labelled:
    return Labelled(text=before + _cut(series.label), style=series.style, line=line)


def _rate_labelled(series: Series) -> Labelled:
    return _labelled(series, series.throughput, f"{words.short(series.samples_per_second)} ")


def _cut(label: str) -> str:
    most = LABEL_CHARACTERS[1]
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _footer(comparison: Comparison) -> str:
    """Return what the lines mean, and what must be said beside them, in one line."""
    repeats = max((run.repeat for run in comparison.runs), default=0) > 0
    faint, strong = ("each repeat", "median") if repeats else ("every update", "moving average")
    told = " ".join(words.notes(comparison, summarise(comparison)))
    text = f"Faint: {faint}, strong: {strong}. {told}"
    return text if len(text) <= FOOTER_CHARACTERS else text[: FOOTER_CHARACTERS - 2] + " …"


def _text(figure: Figure, inches_up: float, points: float, colour: str) -> Text:
    weight = "bold" if points == TITLE_POINTS else "normal"
    return figure.text(
        0.3 / WIDTH,
        inches_up / HEIGHT,
        "",
        fontsize=points,
        color=colour,
        weight=weight,
        va="center",
    )


def _paper(figure: Figure) -> FancyBboxPatch:
    """Return the white ground, which looks the same in a light and in a dark notebook."""
    return FancyBboxPatch(
        (0.17, 0.17),
        WIDTH - 0.34,
        HEIGHT - 0.34,
        boxstyle="round,pad=0.15,rounding_size=0.18",
        facecolor=PAPER,
        edgecolor=RULE,
        linewidth=1.2,
        zorder=-1,
        transform=figure.dpi_scale_trans,
    )
