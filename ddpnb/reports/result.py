"""The result of a comparison: shown in a notebook, saved and exported (kernel)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from IPython.core.getipython import get_ipython

from ddpnb.history.comparison import Comparison
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.options import read_options
from ddpnb.reports.export.data import evaluations_frame, runs_frame, steps_frame
from ddpnb.reports.export.report import report_html
from ddpnb.reports.export.script import write_script
from ddpnb.reports.findings import results_table
from ddpnb.reports.formatting import listed, title
from ddpnb.reports.kit import PAGE_DPI, Picture, image_html
from ddpnb.reports.reading import explained, five_columns, how_to_read
from ddpnb.reports.sentence import sentence
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import Table

if TYPE_CHECKING:
    import pandas as pd


@final
class ComparisonResult:
    """The result of a comparison, of this kernel or from the store."""

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
        table = explained(results_table(self.comparison, self.options.target))
        y, known = self.options.y, self.comparison.measured
        if not y or y in known or not self.comparison.runs:
            return table
        others = listed(known) if known else "nothing but the loss"
        note = f"nothing is drawn for --y {y}: the steps of these runs measured {others}"
        return replace(table, notes=(*table.notes, note))

    def plot(
        self,
        *,
        x: str | None = None,
        log: bool | None = None,
        target: float | str | None = None,
        panels: str | None = None,
    ) -> Picture:
        """Return the figure, with the options of the comparison or with others.

        Args:
            x: draw losses against ``"samples"``, ``"seconds"`` or ``"updates"`` alone; ``""``
                for samples and seconds side by side.
            log: whether the axis of losses is logarithmic.
            target: a training loss to mark, or ``"accuracy=0.95"`` on held-out samples.
            panels: ``"all"``: every panel.
        """
        from ddpnb.reports.figures.figure import draw  # noqa: PLC0415 - matplotlib takes 0.3 s

        given = {"x": x, "log": log, "target": target, "panels": panels}
        others = {name: value for name, value in given.items() if value is not None}
        options = replace(self.options, **read_options(PlotOptions, others))
        return Picture(draw(self.comparison, options), self.sentence())

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

    def _sentences(self) -> list[str]:
        return [self.sentence(), *filter(None, [self.remark])]

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

    def save(self, folder: Path | str) -> tuple[Path, Path, Path]:
        """Write ``comparison.html`` (self-contained), ``.png`` and ``.csv`` (one row per run).

        Args:
            folder: created if absent.

        Returns:
            The three paths, in that order.

        Raises:
            UserError: a file cannot be written.
        """
        target = Path(folder)
        page, picture, runs = (target / f"comparison.{kind}" for kind in ("html", "png", "csv"))
        try:
            target.mkdir(parents=True, exist_ok=True)
            _write_report(self, page)
            _write_figure(self, picture)
            _write_runs(self, runs)
        except OSError as error:
            raise UserError(f"The comparison cannot be saved in {target}: {error}.") from error
        return page, picture, runs

    def __repr__(self) -> str:
        table = self.table()
        notes = (*table.notes, "every column: result.table()")
        shown = replace(five_columns(table), notes=notes)
        return "\n\n".join([*self._sentences(), shown.text()])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return sentence, figure and table together, and each alone as a fallback."""
        png = self.plot().png()
        html = self.sentence_html() + image_html(png, title(self.comparison)) + self.table_html()
        return {"text/plain": repr(self), "text/html": html, "image/png": png}

    def _ipython_display_(self) -> None:
        """Show nothing if the cell already shows the result; else leave it to the bundle."""
        shell = get_ipython()
        if shell is None or shell.execution_count != self.shown_in_cell:
            raise NotImplementedError  # makes IPython use the bundle


def export(result: ComparisonResult, path: Path | str) -> str:
    """Write a comparison to a file, in the format that its ending names.

        race.csv        one row per step of each worker
        race.runs.csv   one row per run
        race.html       the report: figure, table, sentence, code, environment; self-contained
        race.png        the figure
        train.py        the comparison's cell as a script for torchrun

    Args:
        result: the comparison.
        path: as above; missing folders are created, an existing file is replaced.

    Returns:
        One sentence about what was written; after that of a script, the lines that run it.

    Raises:
        UserError: the ending is unknown, or the file cannot be written.
    """
    target = Path(path)
    ending = ".runs.csv" if target.name.endswith(".runs.csv") else target.suffix
    if ending not in WRITERS:
        raise UserError(
            f"{target.name} has no ending that can be written: choose one of "
            f"{', '.join(WRITERS)}; the .csv files and result.to_frame() have all numbers for "
            "other tools."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return f"{target}: {WRITERS[ending](result, target)}"
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}.") from error


def _write_steps(result: ComparisonResult, path: Path) -> str:
    return _write_csv(result.steps(), path, "step of each worker")


def _write_runs(result: ComparisonResult, path: Path) -> str:
    return _write_csv(result.to_frame(), path, "run")


def _write_csv(frame: "pd.DataFrame", path: Path, row: str) -> str:
    frame.to_csv(path, index=False)
    return f"{len(frame):,} rows, one per {row}."


def _write_report(result: ComparisonResult, path: Path) -> str:
    png = result.plot().png(PAGE_DPI)
    path.write_text(report_html(result.comparison, png, result.options.target), encoding="utf-8")
    return "a self-contained report."


def _write_figure(result: ComparisonResult, path: Path) -> str:
    path.write_bytes(result.plot().png(PAGE_DPI))
    return "the figure."


WRITERS: Mapping[str, Callable[[ComparisonResult, Path], str]] = {
    ".csv": _write_steps,
    ".html": _write_report,
    ".png": _write_figure,
    ".py": lambda result, path: write_script(result.comparison, path),
    ".runs.csv": _write_runs,
}
"""The writer of each ending; it returns what it wrote."""
