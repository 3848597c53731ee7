"""What stands below a figure: five columns, and all else under "How to read this" (kernel)."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from ddpnb.reports.table import QUIET, Table

NUM_COLUMNS = 5
SCORES = ("held-out accuracy", "held-out loss", "final loss")
"""Of these columns the first that there is stands among the five."""
ORDER = ("lr", "samples/s", "speed-up", "efficiency", "exposed")
"""What else does, after the target, the score and the cell's own scores, while there is room."""

FIGURE = (
    "Curves: the faint line is every update, the strong one a moving average; of several repeats, "
    "each repeat and their median.",
    "Samples per second: the outline is the ideal, devices × single; the thick stroke is the "
    "speed of no-comm, the same training without communication; the thin line is the range.",
    "Time of one step: the mean over ranks and steps. Hidden communication runs beside the "
    "backward pass, and on a CPU takes a core's time; exposed is what a rank spends on "
    "communication and waiting.",
    "Own work by rank, memory and staleness appear where they say something; "
    "--panels all shows every panel.",
)


def five_columns(table: Table) -> Table:
    """Return the columns that a class needs, without ranges and notes."""
    titles = [column.title for column in table.columns]
    score = next((title for title in SCORES if title in titles), "")
    own = [t for t in titles if t.startswith(("to ", "held-out ")) and t not in SCORES]
    ranked = [titles[0], *ORDER[:3], score, *own, *ORDER[3:], *titles]
    chosen = list(dict.fromkeys(title for title in ranked if title in titles))[:NUM_COLUMNS]
    at = [index for index, title in enumerate(titles) if title in chosen]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in at),
        rows=tuple(
            (row[0], *(replace(row[index], quiet="") for index in at[1:])) for row in table.rows
        ),
        notes=(),
    )


def how_to_read(table: Table) -> str:
    """Return every column, formula and note as HTML that is folded until it is clicked."""
    whole = replace(table, notes=())
    formulas = [f"{each.title}: {each.about}" for each in table.columns if each.about]
    lists = _list("Notes", table.notes) + _list("The figure", FIGURE) + _list("Columns", formulas)
    return (
        '<details><summary style="cursor:pointer;padding:.2em .5em">How to read this</summary>'
        f"{whole.html()}{lists}</details>"
    )


def _list(head: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<div>{escape(each)}</div>" for each in sentences)
    return f'<div style="{QUIET}padding:.3em .55em"><b>{head}</b>{items}</div>' if items else ""
