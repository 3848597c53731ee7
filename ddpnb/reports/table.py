"""What does a table look like, as HTML and as text?  (Notebook side.)

Colours and fonts come from the page around it, so it fits a light and a dark theme;
styles stand in the elements, because Jupyter drops style sheets from saved notebooks
that it does not trust.  Everything shown is escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import final

LINE = "1px solid rgba(128,128,128,.35)"
CELL = "padding:.42em .5em;border:0;background:transparent;vertical-align:top;"
STAYS = (
    "position:sticky;left:0;z-index:1;"
    "background:var(--jp-layout-color0,var(--vscode-editor-background,Canvas));"
)
"""Of the first column, which stays in sight and covers what is scrolled below it."""
HEAD_OF_ROW = f"{CELL}{STAYS}text-align:left;font-weight:600;"
BROKEN = "min-width:14em;overflow-wrap:anywhere;white-space:normal;"
PROSE = "min-width:12em;overflow-wrap:anywhere;white-space:normal;"
TABLE = (
    "border-collapse:collapse;border:0;margin:0;font-variant-numeric:tabular-nums;"
    "color:inherit;font-size:.93em;line-height:1.35;table-layout:auto;"
)
AROUND = "overflow-x:auto;scrollbar-width:thin;max-width:100%;margin:.4em 0;"
"""Of what scrolls where a table is wider than its page."""
QUIET = "opacity:.72;font-size:.88em;font-weight:400;"
RIM = "box-shadow:0 0 0 1px rgba(128,128,128,.4);"
"""Of a dot: a dark one is seen on a dark ground, a pale one on white."""

LONGEST_LINE = 9
"""Characters from which on a head is broken in two."""
LONGEST_CELL = 28
"""Characters from which on a cell that is no sentence is shortened, and a row's head broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's head, and how its cells are set."""

    title: str
    is_number: bool = False
    """Whether its cells stand at the right."""
    is_prose: bool = False
    """Whether its cells are sentences, which break into lines; others are shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What stands in a cell."""

    text: str
    quiet: str = ""
    """Stands after the text, or below it, less loud: a range, a unit."""
    dot: str = ""
    """Colour of a dot before the text, e.g. ``"#3f90da"``."""
    is_hollow: bool = False
    """Whether the dot is but an outline, as the marker of a variant."""


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
        head = "".join(
            _head(column, STAYS if index == 0 else "") for index, column in enumerate(self.columns)
        )
        body = "".join(_row(self.columns, row) for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div style="{AROUND}"><table style="{TABLE}">'
            f'<caption style="text-align:left;caption-side:top;padding:.3em .5em;color:inherit;'
            f'font-weight:600">{escape(self.caption)}</caption>'
            f'<thead><tr style="border-bottom:{LINE};background:transparent">{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
            + (f'<div style="{QUIET}padding:0 .55em .4em">{notes}</div>' if notes else "")
        )

    def text(self) -> str:
        """Return the table for a terminal, columns aligned."""
        grid = [[column.title for column in self.columns]]
        grid += [list(map(_plain, self.columns, row)) for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
        lines = [_text_row(self.columns, cells, widths) for cells in grid]
        return "\n".join([self.caption, "", *lines, *(f"  {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def pairs_table(caption: str, pairs: Mapping[str, str]) -> Table:
    """Return names and values, one pair a row."""
    return Table(
        caption=caption,
        columns=(Column(title="what"), Column(title="value", is_prose=True)),
        rows=tuple((Cell(text=name), Cell(text=value)) for name, value in pairs.items()),
    )


def dot(colour: str, is_hollow: bool = False) -> str:
    """Return a small disc or ring in HTML, passed over by a screen reader."""
    inside = "transparent" if is_hollow else escape(colour)
    return (
        '<span aria-hidden="true" style="display:inline-block;width:.7em;height:.7em;'
        f"box-sizing:border-box;border:.17em solid {escape(colour)};{RIM}"
        f'border-radius:50%;margin-right:.5em;background:{inside}"></span>'
    )


def _head(column: Column, stays: str) -> str:
    side = "right" if column.is_number else "left"
    style = f"{CELL}{stays}text-align:{side};font-weight:600;vertical-align:bottom;"
    style += "white-space:normal;font-size:.95em"
    whole = '<span style="white-space:nowrap">'
    lines = " ".join(f"{whole}{escape(line)}</span>" for line in in_two_lines(column.title))
    return f'<th scope="col" style="{style}">{lines}</th>'


def in_two_lines(title: str) -> list[str]:
    """Return the parts that a head may be broken into: one or, where it is long, two."""
    breaks = [at for at, letter in enumerate(title) if letter == " "]
    if len(title) <= LONGEST_LINE or not breaks:
        return [title]
    middle = min(breaks, key=lambda at: max(at, len(title) - at))
    return [title[:middle], title[middle + 1 :]]


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    head = HEAD_OF_ROW + (BROKEN if len(row[0].text) > LONGEST_CELL else "white-space:nowrap")
    cells = f'<th scope="row" style="{head}">{_inner(row[0], below=True)}</th>'
    for column, cell in zip(columns[1:], row[1:], strict=True):
        side = "right" if column.is_number else "left"
        wraps = PROSE if column.is_prose else "white-space:nowrap"
        is_cut = len(cell.text) > LONGEST_CELL and not column.is_prose
        whole = f' title="{escape(cell.text)}"' if is_cut else ""
        shown = replace(cell, text=f"{cell.text[: LONGEST_CELL - 1]}…") if is_cut else cell
        inner = _inner(shown, below=column.is_number)
        cells += f'<td style="{CELL}text-align:{side};{wraps}"{whole}>{inner}</td>'
    return f'<tr style="border-bottom:{LINE};background:transparent">{cells}</tr>'


def _inner(cell: Cell, *, below: bool) -> str:
    """Return a cell's inside; what is quiet stands behind the text or below it."""
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
