"""Drawing code that all figures share: paper, axes, notes, rank colours, PNG, HTML.

ddpnb draws figures without pyplot, so matplotlib does not keep the figures in memory.  Importing
matplotlib takes 0.3 s, so ddpnb imports it only when it draws the first picture.
Runs in the kernel.
"""

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from ddpnb.protocol.errors import UserError
from ddpnb.reports.style import (
    FONT_POINTS,
    INK,
    MUTED,
    PAPER,
    PART_COLOURS,
    RULE,
    SMALL_POINTS,
    TITLE_POINTS,
    contrast_on_white,
)
from ddpnb.reports.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

WIDTH, DPI, PAGE_DPI = 14.0, 100, 160
"""Width of a picture in inches, dots per inch on a screen, and dots per inch in a saved file."""
LEFT, RIGHT, TOP, FOOT = 0.3, 0.45, 0.95, 0.3
"""Margins in inches: left, right, above the drawing (with the title), and below the notes."""
NOTE_HEIGHT = 0.24
NOTE_CHARACTERS_PER_INCH = 11.2

RANK_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
"""Colours of the ranks in every picture.  Rank 10 has the same colour as rank 0, and so on.
Source: Petroff, "Accessible color sequences for data visualization", 2021."""

MAX_DRAWN_RANKS = 16
"""Maximum number of ranks that a figure draws.  A note says how many ranks are not drawn."""

Look = Mapping[str, Any]
"""Keyword arguments with which matplotlib draws an element, such as its colour."""

WAITING_LOOK: Look = {
    "facecolor": PAPER,
    "edgecolor": PART_COLOURS["waiting"],
    "hatch": "////",
    "linewidth": 0.9,
}
"""The look of a bar that shows the waiting time of a rank."""


def rank_colour(rank: int) -> str:
    """Return the colour of a rank.  A rank has the same colour in all pictures."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def ink_on(colour: str) -> str:
    """Return the text colour, white or dark, that has more contrast on this background colour."""
    return PAPER if contrast_on_white(colour) ** 2 >= contrast_on_white(INK) else INK


# -- paper ---------------------------------------------------------------------------------


@final
class Sheet:
    """The background of a picture, with a title above the drawing and notes below the drawing.

    Args:
        title: the title in one line.
        height: height of the drawing in inches, including its ticks and labels.
        notes: sentences that are written below the drawing.
        width: width of the picture in inches.
    """

    def __init__(
        self, title: str, height: float, notes: Sequence[str] = (), *, width: float = WIDTH
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  0.3 s
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415

        characters = int((width - 2 * LEFT) * NOTE_CHARACTERS_PER_INCH)
        lines = [line for note in notes for line in textwrap.wrap(note, characters)]
        self.width = width
        self.height = TOP + height + NOTE_HEIGHT * len(lines) + FOOT
        self.figure = Figure(figsize=(width, self.height), dpi=DPI, facecolor="none")
        FigureCanvasAgg(self.figure)
        paper = FancyBboxPatch(  # white in light and in dark notebooks
            (0.17, 0.17),
            width - 0.34,
            self.height - 0.34,
            boxstyle="round,pad=0.15,rounding_size=0.18",
            facecolor=PAPER,
            edgecolor=RULE,
            linewidth=1.2,
            zorder=-1,
            transform=self.figure.dpi_scale_trans,
        )
        self.figure.add_artist(paper)
        at: dict[str, Any] = {"x": LEFT / width, "va": "center"}
        look: Look = {"fontsize": TITLE_POINTS, "color": INK, "weight": "bold"}
        head = self.figure.text(y=1 - 0.38 / self.height, s=title, **at, **look)
        room = 0.95 * (width - 2 * LEFT) * DPI / head.get_window_extent().width
        head.set_fontsize(TITLE_POINTS * min(1.0, room))
        look = {"fontsize": SMALL_POINTS - 1, "color": MUTED}
        for number, line in enumerate(lines):
            down = TOP + height + NOTE_HEIGHT * (number + 0.5)
            self.figure.text(y=1 - down / self.height, s=line, **at, **look)

    def axes(
        self, height: float, *, down: float = 0.0, left: float = LEFT, right: float = RIGHT
    ) -> "Axes":
        """Add and return axes.  All sizes are in inches; ``down`` is the space above the axes."""
        bottom = self.height - TOP - down - height
        return self.figure.add_axes(
            (
                left / self.width,
                bottom / self.height,
                (self.width - left - right) / self.width,
                height / self.height,
            )
        )


# -- axes ----------------------------------------------------------------------------------


def dress(
    axes: "Axes", *, title: str = "", x_label: str = "", grid: Literal["x", "y", "both"] = "x"
) -> None:
    """Give axes the common look of all pictures: a line only at the x axis, pale grid lines."""
    axes.set_facecolor("none")
    if title:
        axes.set_title(
            title, loc="left", fontsize=FONT_POINTS, fontweight="bold", color=INK, pad=8, y=1.0
        )  # y=1.0, because otherwise matplotlib needs a third of the drawing time to find y
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=MUTED, labelpad=4)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis=grid, color=RULE, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=MUTED, color=MUTED)
    axes.xaxis.set_major_formatter("{x:,g}")


def write_label(
    axes: "Axes",
    x: float,
    y: float,
    text: str,
    *,
    points: float = SMALL_POINTS,
    colour: str = INK,
    va: str = "center",
    **look: Any,
) -> "Text":
    """Write a text at a position.  ``look`` has arguments for matplotlib, like ``ha="right"``."""
    return axes.text(x, y, text, fontsize=points, color=colour, va=va, **look)


def name_row(axes: "Axes", y: float, name: str, *, rank: int = -1) -> None:
    """Write a row's name at the left edge of the picture, after a square in the rank's colour.

    Args:
        axes: axes that begin ``ROW_NAMES`` inches from the picture's left edge.
        y: the middle of the row.
        name: the name of the row, such as ``"rank 0"``.
        rank: the rank of the row, or -1 if the row does not belong to a rank.
    """
    look: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "va": "center"}
    look |= {"textcoords": "offset points", "annotation_clip": False}
    left = -72 * (ROW_NAMES - LEFT)
    if rank >= 0:
        axes.annotate("■", (0, y), (left, 0), fontsize=18, color=rank_colour(rank), **look)
    axes.annotate(name, (0, y), (left + 20, 0), fontsize=FONT_POINTS, color=INK, **look)


ROW_NAMES = 2.05
"""Width in inches of the space left of the axes, for the names of rows and their labels."""


def legend(axes: "Axes", looks: Mapping[str, str | Look], **place: Any) -> None:
    """Draw a legend, by default above the axes at the right.

    ``looks`` maps each name in the legend to a colour, or to the look of a bar.  ``place`` has
    arguments for matplotlib's ``legend``, such as another position.
    """
    from matplotlib.patches import Patch  # noqa: PLC0415  0.3 s

    patches = [
        Patch(label=name, **({"facecolor": look} if isinstance(look, str) else look))
        for name, look in looks.items()
    ]
    look: dict[str, Any] = {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 1.0),
        "ncols": len(patches),
        "frameon": False,
        "fontsize": SMALL_POINTS - 1,
        "labelcolor": INK,
        "handlelength": 1.1,
        "handletextpad": 0.4,
        "columnspacing": 1.1,
        "borderaxespad": 0.15,
        "borderpad": 0.0,
    }
    axes.legend(handles=patches, **(look | place))


# -- results in notebooks and files --------------------------------------------------------


@final
class Picture:
    """A matplotlib figure that a notebook shows as PNG.

    Args:
        figure: the matplotlib figure.
        description: one or two sentences that describe the figure to blind readers.
    """

    def __init__(self, figure: "Figure", description: str) -> None:
        self.figure = figure
        self.description = description

    def png(self, dpi: float = DPI) -> bytes:
        """Return the picture as PNG with ``dpi`` dots per inch."""
        return self._saved(format="png", dpi=dpi)

    def svg(self) -> bytes:
        """Return the picture as SVG."""
        return self._saved(format="svg")

    def _saved(self, **options: Any) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, **options)
        return buffer.getvalue()

    def html(self, dpi: float = DPI) -> str:
        """Return an HTML image element that contains the PNG data."""
        style, data = "max-width:100%;height:auto", base64.b64encode(self.png(dpi)).decode("ascii")
        alt = escape(self.description)
        return f'<img style="{style}" alt="{alt}" src="data:image/png;base64,{data}">'

    def __repr__(self) -> str:
        return self.description

    _repr_png_ = png


class Shown:
    """A result that you can save.  A notebook shows its pictures, its table and its text."""

    endings: ClassVar[Mapping[str, str]] = {
        ".png": "the picture",
        ".svg": "the picture",
        ".html": "a page in a single file",
        ".txt": "the text",
    }
    """The file name endings that ``save`` accepts, with a description of each file."""

    def text(self) -> str:
        """Return the whole result as text."""
        return "" if (table := self.table()) is None else table.text()

    def pictures(self) -> Sequence[Picture]:
        """Return the pictures.  The result is empty if there are no pictures."""
        return ()

    def table(self) -> Table | None:
        """Return the table, or None if the result has no table."""
        return None

    def html(self, images: str) -> str:
        """Return HTML for a notebook: pictures, table and, if there are pictures, folded text."""
        folded = (
            '<details><summary>As text</summary><pre style="white-space:pre-wrap">'
            f"{escape(self.text())}</pre></details>"
        )
        table = "" if (found := self.table()) is None else found.html()
        return images + table + folded * bool(images)

    def plot(self) -> Picture:
        """Return the first picture.  Its attribute ``figure`` is a matplotlib figure.

        Raises:
            UserError: the result has no picture.
        """
        if not (pictures := self.pictures()):
            raise UserError(self.text())
        return pictures[0]

    def save(self, path: Path | str) -> str:
        """Write the result to a file.  The ending of the file's name determines the format.

        Args:
            path: the file.  Missing folders are created, and an existing file is replaced.

        Returns:
            The file's path and a description of the file.

        Raises:
            UserError: the ending is not in ``endings``, or the file cannot be written.
        """
        target = Path(path).expanduser()
        if "\0" in str(target):
            raise UserError("The name of a file cannot contain a null character. Remove it.")
        fitting = [ending for ending in self.endings if target.name.endswith(ending)]
        if not fitting:
            endings = ", ".join(self.endings)
            raise UserError(f"Cannot save {target.name}. End the name with one of {endings}.")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return f"{target}: {self.write(target, max(fitting, key=len))}"
        except OSError as error:
            why = f"{error.strerror}. Choose another folder, such as /tmp/{target.name}."
            raise UserError(f"{target} cannot be written: {why}") from error

    def write(self, target: Path, ending: str) -> str:
        """Write the file ``target`` into an existing folder, and return the file's description."""
        target.write_bytes(self.content(ending))
        return f"{self.endings[ending]}."

    def content(self, ending: str) -> bytes:
        """Return the bytes of a file with this ending.  PNG and SVG show only the first picture."""
        match ending:
            case ".png":
                return self.plot().png(PAGE_DPI)
            case ".svg":
                return self.plot().svg()
            case ".html":
                images = "".join(each.html(PAGE_DPI) for each in self.pictures())
                return page(self.text().partition("\n")[0], self.html(images)).encode()
        return f"{self.text()}\n".encode()

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return the MIME bundle: the text, and all parts with the pictures as HTML."""
        bundle: dict[str, Any] = {"text/plain": self.text()}
        if html := self.html("".join(each.html() for each in self.pictures())):
            bundle["text/html"] = html
        return bundle


STYLE_SHEET = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; }
pre { padding: 1rem; overflow: auto; border-radius: .5rem; background: rgba(128,128,128,.12); }
.wide { overflow-x: auto; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
@media print {
  body { max-width: none; margin: 0; font-size: 11pt; }
  pre { white-space: pre-wrap; overflow: visible !important; max-height: none !important; }
  img, tr, pre { break-inside: avoid; }
  h2 { break-after: avoid; }
  .wide, .wide > div { overflow-x: visible !important; }
}
"""


def page(title: str, body: str) -> str:
    """Return a self-contained HTML page.  ``title`` is plain text, and ``body`` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE_SHEET}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )
