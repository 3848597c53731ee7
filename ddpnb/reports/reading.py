"""What stands below a figure: five columns, and all else under "How to read this" (kernel)."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from ddpnb.reports.table import QUIET, Cell, Table

NUM_COLUMNS = 5
SCORES = ("held-out accuracy", "held-out loss", "final loss")
"""Of these columns the first that there is stands among the five."""
ORDER = ("lr", "samples/s", "speed-up", "efficiency", "exposed", "workers")
"""What else does, after the target, the score and the cell's own scores, while there is room."""

ABOUT = {
    "strategy": "how the ranks share the work; docs/strategies.md",
    "workers": "ranks that train",
    "lr": "learning rate of the optimizer",
    "samples/s": "samples of all ranks / seconds of the slowest rank, warm-up left out",
    "speed-up": "samples/s over those of single, the same training on one device",
    "efficiency": "speed-up / number of devices; 100 % is ideal. Below it: machine × communication",
    "exposed": "share of a step in which a rank exchanges tensors or waits, and computes nothing",
    "sent per step": "bytes that one worker sends in one step",
    "received per step": "bytes that one worker receives in one step",
    "final loss": "training loss at the end of the strong line",
    "held-out loss": "mean loss of the trained model on samples that it was not trained on",
    "held-out accuracy": "share of held-out samples that the trained model classifies right",
    "staleness": "updates by others between reading the parameters and applying the gradient",
    "samples lost": "samples that were handed out to a rank that died",
    "memory per rank": "bytes of the rank that holds most",
}
"""What the columns are, by their titles: shown when the pointer is on a column's head."""

FIGURE = (
    "Curves: the faint line is every update, the strong one a moving average; of several repeats, "
    "each repeat and their median.",
    "Samples per second: the outline is the ideal, devices × single; the thick stroke is the "
    "speed of no-comm, the same training without communication; the thin line is the range.",
    "Time of one step: the mean over ranks and steps. Hidden communication runs beside the "
    "backward pass; exposed is what a rank spends on communication and waiting.",
    "Own work by rank, memory and staleness appear where they say something; "
    "--panels all shows every panel.",
)


def explained(table: Table) -> Table:
    """Return a table whose column heads say what they are."""
    columns = [replace(each, about=_about(each.title)) for each in table.columns]
    return replace(table, columns=tuple(columns))


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
            (head, *(replace(row[index], quiet="") for index in at[1:]))
            for row, head in zip(table.rows, _heads(table), strict=True)
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


def _heads(table: Table) -> list[Cell]:
    """Return the heads of the rows, without what is the same in all of them."""
    heads = [row[0] for row in table.rows]
    is_common = len(heads) > 1 and len({head.quiet for head in heads}) == 1
    return [replace(head, quiet="") for head in heads] if is_common else heads


def _about(title: str) -> str:
    if title.startswith("to "):
        return f"training time and samples until {title.removeprefix('to ')} was first reached"
    if title.startswith("held-out "):
        return ABOUT.get(title, "what the cell's own metric measured on held-out samples")
    return ABOUT.get(title, "")


def _list(head: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<div>{escape(each)}</div>" for each in sentences)
    return f'<div style="{QUIET}padding:.3em .55em"><b>{head}</b>{items}</div>' if items else ""
