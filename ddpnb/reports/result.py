"""The result of a comparison: you can show, save and export it.  Runs in the kernel."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from IPython.core.getipython import get_ipython

from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.options import read_options
from ddpnb.reports.export.script import write_script
from ddpnb.reports.findings import results_table
from ddpnb.reports.formatting import emulated_devices, title
from ddpnb.reports.kit import PAGE_DPI, Picture, Shown, page
from ddpnb.reports.listing import Details
from ddpnb.reports.sentence import sentence
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import QUIET, Table
from ddpnb.results import frames
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import Row
from ddpnb.results.ratios import ratio_rows, ratios_frame

if TYPE_CHECKING:
    import pandas as pd


NUM_COLUMNS = 5
SCORE_TITLES = ("held-out accuracy", "held-out loss", "final loss")
"""Titles of the score columns.  The short table has the first of these columns that exists."""
ORDER = ("lr", "samples/s", "speed-up", "efficiency", "exposed")
"""Titles of other columns.  The short table has the last two columns only if there is room."""

FIGURE = (
    "Curves: the faint line shows every update, and the strong line is a moving average. If there "
    "are several repeats, each faint line is a repeat, and the strong line is their median.",
    "Samples per second: the outline is the ideal, N times the speed of single on N devices. The "
    "thick mark is no-comm, the same training without communication. The thin line is the range.",
    "Time of one step: the mean over ranks and steps. Hidden communication overlaps with the "
    "backward pass, but on CPUs it still takes processor time. Communication and waiting are "
    "exposed if the rank does not compute at the same time.",
    "Own work by rank is shown if a rank is slow or dies, memory if strategies need different "
    "amounts, and staleness if a strategy is asynchronous. --panels all shows every panel.",
)


@final
class ComparisonResult(Shown):
    """The result of a comparison that this kernel ran, or of a stored comparison."""

    endings: ClassVar = {
        ".csv": "one row per step of each worker",
        ".html": "the report in a single file: figure, table, settings, code",
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
        """A function that returns the trained model of a run.  None for a stored result."""
        self.remark = ""
        """A sentence about the measurement.  It is shown after the computed sentence."""
        self.shown_in_cell: int | None = None
        """Number of the cell that already shows the result.  This cell does not show it again."""

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of ``strategies()``, computed once for figure, table and sentence."""
        return frames.strategy_rows(self.comparison, self.options.target)

    def table(self) -> Table:
        """Return the table: one row per strategy with its speed, communication and scores."""
        return results_table(self.comparison, self.rows, self.options.target)

    def plot(self, **options: Any) -> Picture:
        """Return the figure.

        Args:
            **options: ``log``, ``target`` or ``panels``.  These replace the comparison's options.
        """
        from ddpnb.reports.figures.figure import draw  # noqa: PLC0415 - matplotlib takes 0.3 s

        chosen = replace(self.options, **read_options(PlotOptions, options))
        is_same = chosen.target == self.options.target
        rows = self.rows if is_same else frames.strategy_rows(self.comparison, chosen.target)
        return Picture(draw(self.comparison, rows, chosen), self.sentence())

    def pictures(self) -> list[Picture]:
        """Return a list that contains the figure."""
        return [self.plot()]

    def sentence(self) -> str:
        """Return a sentence that summarises the comparison, computed from its runs."""
        target = self.options.target
        ratios = ratio_rows(self.comparison, target)
        return sentence(self.rows, ratios, target, emulated_devices(self.comparison))

    def sentence_html(self) -> str:
        """Return the sentences above a figure, as HTML."""
        return "".join(f"<p>{escape(each)}</p>" for each in self._sentences())

    def table_html(self) -> str:
        """Return the HTML below a figure: a table with five columns, and the folded full table."""
        table = self.table()
        return replace(five_columns(table), caption="").html() + how_to_read(table)

    def runs(self) -> "pd.DataFrame":
        """Return one row per run: settings, totals, speed, parts of a step, memory and scores."""
        return frames.runs_frame(self.comparison, self.options.target)

    def strategies(self) -> "pd.DataFrame":
        """Return one row per strategy, computed from ``runs()``.

        Speeds are geometric means over the repeats, scores are medians, and parts of a step are
        means over all steps.  A range over the repeats is in columns that end with ``_low`` and
        ``_high``.
        """
        return frames.strategies_frame(self.comparison, self.options.target)

    def ratios(self) -> "pd.DataFrame":
        """Return one row per quantity and strategy: the ratio to the reference strategy.

        ``low`` and ``high`` are a 95 % interval for three repeats or more (docs/significance.md).
        ``repeats_needed`` is the number of repeats that show the ratio with 80 % probability, or 0.
        """
        return ratios_frame(self.comparison, self.options.target)

    to_frame = runs

    def model(self, strategy: str) -> Any:
        """Return the ``torch.nn.Module`` that a strategy trained in its last repeat.

        Rank 0 keeps one model of each strategy in memory until the next comparison.  Each call
        imports torch and copies the model from rank 0 to the notebook's CPU memory.

        Raises:
            UserError: this kernel did not train the model, or rank 0 no longer has the model.
        """
        trained = (run for run in self.comparison.runs if run.spec and not run.spec.is_ceiling)
        runs = {run.name: run for run in trained}
        if strategy not in runs:
            raise one_of("trained model", strategy, runs)
        if self._model_of is None:
            raise UserError(
                f"The model of {strategy} is not available, because stored runs have no models. "
                "Only the latest comparison has models, and only in the kernel that trained them."
            )
        return self._model_of(runs[strategy].run_id)

    def evaluations(self) -> "pd.DataFrame":
        """Return one row per evaluation on held-out samples, as a tidy DataFrame."""
        return frames.evaluations_frame(self.comparison)

    def steps(self) -> "pd.DataFrame":
        """Return one row per step of each worker, as a tidy DataFrame."""
        return frames.steps_frame(self.comparison)

    def text(self) -> str:
        """Return the sentence, the table with five columns, and the notes."""
        table = self.table()
        notes = (*table.notes, "result.table() has all columns")
        shown = replace(five_columns(table), notes=notes)
        return "\n\n".join([*self._sentences(), shown.text()])

    def html(self, images: str) -> str:
        """Return the sentence, the figure and the table."""
        return self.sentence_html() + images + self.table_html()

    def content(self, ending: str) -> bytes:
        """Return the content of a file with any ending except ``.py``."""
        match ending:
            case ".csv":
                return str(self.steps().to_csv(index=False)).encode()
            case ".runs.csv":
                return str(self.runs().to_csv(index=False)).encode()
            case ".html":
                head = title(self.comparison)
                table = f'<div class="wide">{self.table().html()}</div>'
                parts = [f"<h1>{escape(head)}</h1>", self.sentence_html()]
                parts += [self.plot().html(PAGE_DPI), table, Details(self.comparison).html("")]
                return page(head, "\n".join(parts)).encode()
        return super().content(ending)

    def write(self, target: Path, ending: str) -> str:
        """Write a file, and return its description (for a script, with the command to run it)."""
        if ending == ".py":
            return write_script(self.comparison, target)
        return super().write(target, ending)

    def _sentences(self) -> list[str]:
        names: dict[str, list[str]] = {}
        for run in self.comparison.runs:
            for warning in run.warnings:
                names.setdefault(warning, []).append(run.name)
        found = [f"{', '.join(dict.fromkeys(own))}: {each}" for each, own in names.items()]
        return [self.sentence(), *found, *filter(None, [self.remark])]

    def _ipython_display_(self) -> None:
        """Show the result, unless the current cell already shows it."""
        shell = get_ipython()
        if shell is None or shell.execution_count != self.shown_in_cell:
            raise NotImplementedError  # so IPython shows the MIME bundle


# -- tables below a figure ------------------------------------------------------------------


def five_columns(table: Table) -> Table:
    """Return a table with the five most important columns, without ranges and notes."""
    titles = [column.title for column in table.columns]
    score = next((title for title in SCORE_TITLES if title in titles), "")
    own = [t for t in titles if t.startswith(("to ", "held-out ")) and t not in SCORE_TITLES]
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
    """Return the HTML of all columns, formulas and notes.  It is folded until you click it."""
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
