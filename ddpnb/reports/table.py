"""Tables as HTML and as text.  Runs in the kernel.

A table uses the page's colours and fonts, so it suits light and dark themes.  Jupyter drops style
sheets of untrusted notebooks, so elements have style attributes.  All text is escaped for HTML.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import pandas as pd

LINE = "1px solid rgba(128,128,128,.35)"
CELL_CSS = "padding:.42em .35em;border:0;background:transparent;vertical-align:top;"
STICKY = (
    "position:sticky;left:0;z-index:1;"
    "background:var(--jp-layout-color0,var(--vscode-editor-background,Canvas));"
)
"""The style of the first column.  This column stays visible when you scroll to the right."""
ROW_HEAD = f"{CELL_CSS}{STICKY}text-align:left;font-weight:600;"
WRAPPED_CSS = "overflow-wrap:anywhere;white-space:normal;"
BROKEN = f"min-width:15em;{WRAPPED_CSS}"
PROSE = f"min-width:10em;{WRAPPED_CSS}"
TABLE = (
    "border-collapse:collapse;border:0;margin:0;font-variant-numeric:tabular-nums;"
    "color:inherit;font-size:.93em;line-height:1.35;table-layout:auto;"
)
CAPTION = "text-align:left;caption-side:top;padding:.3em .5em;color:inherit;font-weight:600"
SCROLLER = "overflow-x:auto;scrollbar-width:thin;max-width:100%;margin:.4em 0;"
"""The style of the element around a table.  It has a scroll bar if the table is too wide."""
QUIET = "opacity:.72;font-size:.88em;font-weight:400;"
RIM = "box-shadow:0 0 0 1px rgba(128,128,128,.4);"
"""The rim of a dot.  It makes dark dots visible on black, and pale dots visible on white."""

MAX_CELL_CHARACTERS = 28
"""Maximum number of characters in one line of a cell.  Longer text is broken into lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The title of a column, and the layout of its cells."""

    title: str
    is_number: bool = False
    """True if the cells are numbers.  Numbers are right-aligned."""
    is_prose: bool = False
    """True if the cells are sentences.  Long sentences are broken into lines."""
    about: str = ""
    """An explanation that appears when the pointer is on the column's title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The content of a cell."""

    text: str
    quiet: str = ""
    """A faint text after or below the main text, such as a range or a unit."""
    dot: str = ""
    """The colour of a dot before the text, e.g. ``"#3f90da"``."""
    is_hollow: bool = False
    """True if the dot is drawn as an outline, like the marker of a variant in figures."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table, as HTML in notebooks and as text elsewhere.  A row's first cell is its heading."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """Notes below the table, one per line."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)

    def html(self) -> str:
        """Return the table as HTML, with ``scope`` attributes for screen readers."""
        head = "".join(
            _head(column, STICKY if index == 0 else "") for index, column in enumerate(self.columns)
        )
        body = "".join(_row(self.columns, row) for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        caption = f'<caption style="{CAPTION}">{escape(self.caption)}</caption>'
        return (
            f'<div style="{SCROLLER}"><table style="{TABLE}">'
            f"{caption if self.caption else ''}"
            f'<thead><tr style="border-bottom:{LINE};background:transparent">{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
            + (f'<div style="{QUIET}padding:0 .55em .4em">{notes}</div>' if notes else "")
        )

    def text(self) -> str:
        """Return the table for a terminal, with aligned columns."""
        grid = [[column.title for column in self.columns]]
        grid += [list(map(_plain, self.columns, row)) for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
        lines = [_text_row(self.columns, cells, widths) for cells in grid]
        return "\n".join([self.caption, "", *lines, *(f"  {note}" for note in self.notes)])

    def to_frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame.  Columns that contain only numbers become numeric."""
        import pandas as pd  # noqa: PLC0415 - takes 0.5 s

        frame = pd.DataFrame(
            [[cell.text for cell in row] for row in self.rows],
            columns=[column.title for column in self.columns],
        )
        for title in (column.title for column in self.columns if column.is_number):
            texts = frame[title].astype(str).str.replace(",", "")
            with contextlib.suppress(ValueError):  # a text such as "64 per worker"
                frame[title] = pd.to_numeric(texts.where(texts.str.contains(r"\d")))
        return frame

    __repr__ = text
    _repr_html_ = html


def table_row(*shown: Cell | str | int) -> tuple[Cell, ...]:
    """Return a row of cells.  Strings and numbers are converted to cells."""
    return tuple(each if isinstance(each, Cell) else Cell(text=str(each)) for each in shown)


def dot(colour: str, is_hollow: bool = False) -> str:
    """Return the HTML of a small disc, or of a ring if ``is_hollow``.  Screen readers skip it."""
    inside = "transparent" if is_hollow else escape(colour)
    return (
        '<span aria-hidden="true" style="display:inline-block;width:.7em;height:.7em;'
        f"box-sizing:border-box;border:.17em solid {escape(colour)};{RIM}"
        f'border-radius:50%;margin-right:.5em;background:{inside}"></span>'
    )


def _head(column: Column, sticky: str) -> str:
    side = "right" if column.is_number else "left"
    style = f"{CELL_CSS}{sticky}text-align:{side};font-weight:600;vertical-align:bottom;"
    style += "white-space:normal;font-size:.95em"
    whole = '<span style="white-space:nowrap">'  # prevents a break at a hyphen
    words = " ".join(f"{whole}{escape(word)}</span>" for word in column.title.split())
    about = f' title="{escape(column.about)}"' if column.about else ""
    return f'<th scope="col" style="{style}"{about}>{words}</th>'


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    head = ROW_HEAD + (BROKEN if len(row[0].text) > MAX_CELL_CHARACTERS else "white-space:nowrap")
    cells = f'<th scope="row" style="{head}">{_inner(row[0], below=True)}</th>'
    for column, cell in zip(columns[1:], row[1:], strict=True):
        side = "right" if column.is_number else "left"
        is_long = len(cell.text) > MAX_CELL_CHARACTERS
        wraps = PROSE if column.is_prose else BROKEN if is_long else "white-space:nowrap"
        inner = _inner(cell, below=column.is_number)
        cells += f'<td style="{CELL_CSS}text-align:{side};{wraps}">{inner}</td>'
    return f'<tr style="border-bottom:{LINE};background:transparent">{cells}</tr>'


def _inner(cell: Cell, *, below: bool) -> str:
    """Return the HTML of a cell.  If ``below``, the ``quiet`` text is below the main text."""
    place = "display:block;" if below else ""
    quiet = f' <span style="{place}{QUIET}">{escape(cell.quiet)}</span>' if cell.quiet else ""
    return (dot(cell.dot, cell.is_hollow) if cell.dot else "") + escape(cell.text) + quiet


def _plain(column: Column, cell: Cell) -> str:
    quiet = f"({cell.quiet})" if cell.quiet and column.is_number else cell.quiet
    return f"{cell.text} {quiet}".strip()


def _text_row(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if column.is_number else cell.ljust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return "  ".join(aligned).rstrip()
