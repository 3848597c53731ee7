"""The result of a comparison: shown in a notebook, saved and exported (kernel)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from IPython.core.getipython import get_ipython

from ddpnb.history.comparison import Comparison
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.options import read_options
from ddpnb.reports.export.data import evaluations_frame, runs_frame, steps_frame
from ddpnb.reports.export.script import write_script
from ddpnb.reports.findings import results_table
from ddpnb.reports.formatting import title
from ddpnb.reports.kit import PAGE_DPI, Picture, Shown, page
from ddpnb.reports.listing import Details
from ddpnb.reports.sentence import sentence
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import QUIET, Table

if TYPE_CHECKING:
    import pandas as pd


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


@final
class ComparisonResult(Shown):
    """The result of a comparison, of this kernel or from the store."""

    endings: ClassVar = {
        ".csv": "one row per step of each worker",
        ".html": "the report: figure, table, settings, code; it needs no other file",
        ".png": "the figure",
        ".py": "a script for torchrun",
        ".runs.csv": "one row per run",
        ".svg": "the figure",
        ".txt": "sentence and table",
    }

    def __init__(
        self,
        comparison: Comparison,
        options: PlotOptions = EVERYTHING,
        model_of: Callable[[str], Any] | None = None,
    ) -> None:
        self.comparison = comparison
        self.options = options
        self._model_of = model_of
        """Returns the trained model of a run; None: the ranks have none of these."""
        self.remark = ""
        """A sentence on how it was measured, shown below the others."""
        self.shown_in_cell: int | None = None
        """Number of the cell that already shows the result, so that it is not shown twice."""

    def table(self) -> Table:
        """Return one row per strategy: speed, cost of communication, scores; and notes."""
        return results_table(self.comparison, self.options.target)

    def plot(self, **options: Any) -> Picture:
        """Return the figure, with the options of the comparison or with others.

        Args:
            **options: those of ``%ddp_plot``: ``log``, ``target``, ``panels``.
        """
        from ddpnb.reports.figures.figure import draw  # noqa: PLC0415 - matplotlib takes 0.3 s

        chosen = replace(self.options, **read_options(PlotOptions, options))
        return Picture(draw(self.comparison, chosen), self.sentence())

    def pictures(self) -> list[Picture]:
        """Return the figure."""
        return [self.plot()]

    def sentence(self) -> str:
        """Return what the comparison shows, as one computed sentence."""
        return sentence(self.comparison, self.options.target)

    def sentence_html(self) -> str:
        """Return the sentences as HTML, to be shown above a figure."""
        return "".join(f"<p>{escape(each)}</p>" for each in self._sentences())

    def table_html(self) -> str:
        """Return five columns, and the others folded, as HTML to be shown below a figure."""
        table = self.table()
        return replace(five_columns(table), caption="").html() + how_to_read(table)

    def to_frame(self) -> "pd.DataFrame":
        """Return one row per run, as a tidy DataFrame."""
        return runs_frame(self.comparison)

    def model(self, strategy: str) -> Any:
        """Return the ``torch.nn.Module`` that a strategy has trained, of several repeats the last.

        Rank 0 keeps one model of each strategy in its memory, until the next comparison.  Each
        call copies it to the notebook, on the CPU; this imports torch.

        Raises:
            UserError: it was not trained here, or rank 0 does not have it any more.
        """
        trained = (run for run in self.comparison.runs if run.spec and not run.spec.is_ceiling)
        runs = {run.name: run for run in trained}
        if strategy not in runs:
            raise one_of("trained model", strategy, runs)
        if self._model_of is None:
            raise UserError(
                f"The model of {strategy} is not kept with stored runs: only the result of the "
                "latest comparison has it, in the kernel that has trained it."
            )
        return self._model_of(runs[strategy].run_id)

    def evaluations(self) -> "pd.DataFrame":
        """Return one row per evaluation on held-out samples, as a tidy DataFrame."""
        return evaluations_frame(self.comparison)

    def steps(self) -> "pd.DataFrame":
        """Return one row per step of each worker, as a tidy DataFrame."""
        return steps_frame(self.comparison)

    def text(self) -> str:
        """Return sentence, five columns and notes."""
        table = self.table()
        notes = (*table.notes, "every column: result.table()")
        shown = replace(five_columns(table), notes=notes)
        return "\n\n".join([*self._sentences(), shown.text()])

    def html(self, images: str) -> str:
        """Return sentence, figure and table."""
        return self.sentence_html() + images + self.table_html()

    def content(self, ending: str) -> bytes:
        """Return a file with one of ``endings``, but a script."""
        match ending:
            case ".csv":
                return str(self.steps().to_csv(index=False)).encode()
            case ".runs.csv":
                return str(self.to_frame().to_csv(index=False)).encode()
            case ".html":
                head = title(self.comparison)
                table = f'<div class="wide">{self.table().html()}</div>'
                parts = [f"<h1>{escape(head)}</h1>", self.sentence_html()]
                parts += [self.plot().html(PAGE_DPI), table, Details(self.comparison).html("")]
                return page(head, "\n".join(parts)).encode()
        return super().content(ending)

    def write(self, target: Path, ending: str) -> str:
        """Write a file; return what it is, and after a script the lines that run it."""
        if ending == ".py":
            return write_script(self.comparison, target)
        return super().write(target, ending)

    def _sentences(self) -> list[str]:
        return [self.sentence(), *filter(None, [self.remark])]

    def _ipython_display_(self) -> None:
        """Show nothing if the cell already shows the result; else leave it to the bundle."""
        shell = get_ipython()
        if shell is None or shell.execution_count != self.shown_in_cell:
            raise NotImplementedError  # makes IPython use the bundle


# -- what stands below a figure: five columns, and all else folded --------------------------


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
