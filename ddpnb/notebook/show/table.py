"""What does a table look like, as HTML and as text?  (Notebook side.)

Colours and fonts come from the page around it, so it fits a light and a dark theme;
styles stand in the elements, because Jupyter drops style sheets from saved notebooks
that it does not trust.  Everything shown is escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

LINE = "1px solid rgba(128,128,128,.35)"
CELL = "padding:.42em .75em;border:0;background:transparent;vertical-align:top;"
HEAD_OF_ROW = f"{CELL}text-align:left;font-weight:600;white-space:nowrap;"
TABLE = (
    "border-collapse:collapse;border:0;margin:.4em 0;font-variant-numeric:tabular-nums;"
    "color:inherit;font-size:1em;line-height:1.35;"
)
QUIET = "opacity:.72;font-size:.92em;font-weight:400;"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's head, and whether its cells are numbers, which stand at the right."""

    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What stands in a cell."""

    text: str
    quiet: str = ""
    """Stands after the text, less loud: a range, a unit."""
    dot: str = ""
    """Colour of a dot before the text, e.g. ``"#3f90da"``."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Shown as HTML in a notebook and as text elsewhere; the first cell heads its row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """Stand below, one a line."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)

    def html(self) -> str:
        """Return the table as HTML; scopes tell a screen reader what heads what."""
        head = "".join(_head(column) for column in self.columns)
        body = "".join(_row(self.columns, row) for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<table style="{TABLE}">'
            f'<caption style="text-align:left;caption-side:top;padding:.3em .75em;color:inherit;'
            f'font-weight:600">{escape(self.caption)}</caption>'
            f'<thead><tr style="border-bottom:{LINE};background:transparent">{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>"
            + (f'<div style="{QUIET}padding:0 .82em .4em">{notes}</div>' if notes else "")
        )

    def text(self) -> str:
        """Return the table for a terminal, columns aligned."""
        grid = [[column.title for column in self.columns]]
        grid += [[_plain(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
        lines = [_text_row(self.columns, cells, widths) for cells in grid]
        return "\n".join([self.caption, "", *lines, *(f"  {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def dot(colour: str) -> str:
    """Return a small disc in HTML, passed over by a screen reader."""
    return (
        '<span aria-hidden="true" style="display:inline-block;width:.7em;height:.7em;'
        f'border-radius:50%;margin-right:.5em;background:{escape(colour)}"></span>'
    )


def _head(column: Column) -> str:
    side = "right" if column.is_number else "left"
    wraps = "normal" if len(column.title) > 10 else "nowrap"
    style = f"{CELL}text-align:{side};font-weight:600;vertical-align:bottom;white-space:{wraps};"
    return f'<th scope="col" style="{style}">{escape(column.title)}</th>'


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    first, *others = row
    cells = f'<th scope="row" style="{HEAD_OF_ROW}">{_inner(first)}</th>'
    for column, cell in zip(columns[1:], others, strict=True):
        side = "right;white-space:nowrap" if column.is_number else "left"
        cells += f'<td style="{CELL}text-align:{side}">{_inner(cell, column.is_number)}</td>'
    return f'<tr style="border-bottom:{LINE};background:transparent">{cells}</tr>'


def _inner(cell: Cell, below: bool = False) -> str:
    """Return a cell's inside; what is quiet stands behind the text, or below a number."""
    place = "display:block;" if below else ""
    quiet = f' <span style="{place}{QUIET}">{escape(cell.quiet)}</span>' if cell.quiet else ""
    return (dot(cell.dot) if cell.dot else "") + escape(cell.text) + quiet


def _plain(cell: Cell) -> str:
    return f"{cell.text} {cell.quiet}".strip()


def _text_row(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if column.is_number else cell.ljust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return "  ".join(aligned).rstrip()
