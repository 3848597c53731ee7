"""The result of a comparison: table, figure, sentence, data (kernel)."""

import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from IPython.core.getipython import get_ipython

from ddpnb.history.comparison import Comparison
from ddpnb.protocol.errors import UserError
from ddpnb.reports.exports.html_report import image_html, report_html
from ddpnb.reports.formatting import title
from ddpnb.reports.plot_options import EVERYTHING, PlotOptions
from ddpnb.reports.results_table import results_table
from ddpnb.reports.sentence import sentence
from ddpnb.reports.table import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SCREEN_DPI = 100
PAGE_DPI = 160


@final
class Picture:
    """A drawn comparison, shown as PNG in a notebook; ``figure`` is a matplotlib figure."""

    def __init__(self, figure: "Figure", description: str) -> None:
        self.figure = figure
        self._description = description

    def png(self, dpi: float = SCREEN_DPI) -> bytes:
        """Return the picture with ``dpi`` dots an inch."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=dpi)
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self._description

    def _repr_png_(self) -> bytes:
        return self.png()


@final
class ComparisonResult:
    """The result of a comparison, of this kernel or from the store."""

    def __init__(self, comparison: Comparison, options: PlotOptions = EVERYTHING) -> None:
        self.comparison = comparison
        self.options = options
        self.shown_in_cell: int | None = None
        """Number of the cell that already shows the result, so that it is not shown twice."""

    def table(self) -> Table:
        """Return one row per strategy: speed, cost of communication, scores; and notes."""
        return results_table(self.comparison, self.options.target)

    def plot(
        self, *, x: str | None = None, log: bool | None = None, target: float | None = None
    ) -> Picture:
        """Return the figure, with the options of the comparison or with others.

        Args:
            x: draw losses against ``"samples"``, ``"seconds"`` or ``"updates"`` alone; ``""``
                for samples and seconds side by side.
            log: whether the axis of losses is logarithmic.
            target: a training loss to mark.
        """
        from ddpnb.reports.figures.figure import draw  # noqa: PLC0415 - matplotlib takes 0.3 s

        options = PlotOptions(
            x=self.options.x if x is None else x,
            log=self.options.log if log is None else log,
            target=self.options.target if target is None else target,
        )
        return Picture(draw(self.comparison, options), self.sentence())

    def sentence(self) -> str:
        """Return what the comparison shows, as one computed sentence."""
        return sentence(self.comparison, self.options.target)

    def summary_html(self) -> str:
        """Return the table and the sentence as HTML, to be shown below a figure."""
        return f"{self.table().html()}<p>{escape(self.sentence())}</p>"

    def to_frame(self) -> "pd.DataFrame":
        """Return one row per run, as a tidy DataFrame."""
        from ddpnb.reports.dataframes import runs_frame  # noqa: PLC0415 - pandas takes 0.5 s

        return runs_frame(self.comparison)

    def steps(self) -> "pd.DataFrame":
        """Return one row per step of each worker, as a tidy DataFrame."""
        from ddpnb.reports.dataframes import steps_frame  # noqa: PLC0415 - pandas takes 0.5 s

        return steps_frame(self.comparison)

    def save(self, folder: Path | str) -> tuple[Path, Path, Path]:
        """Write ``comparison.html`` (self-contained), ``.png`` and ``.csv``.

        Args:
            folder: created if absent.

        Returns:
            The three paths, in that order.

        Raises:
            UserError: a file cannot be written.
        """
        png = self.plot().png(PAGE_DPI)
        target = Path(folder)
        paths = tuple(target / f"comparison.{kind}" for kind in ("html", "png", "csv"))
        try:
            target.mkdir(parents=True, exist_ok=True)
            paths[0].write_text(
                report_html(self.comparison, png, self.options.target), encoding="utf-8"
            )
            paths[1].write_bytes(png)
            self.to_frame().to_csv(paths[2], index=False)
        except OSError as error:
            raise UserError(f"The comparison cannot be saved in {target}: {error}.") from error
        return paths[0], paths[1], paths[2]

    def __repr__(self) -> str:
        return f"{self.table().text()}\n\n{self.sentence()}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Return figure and table together, and each alone as a fallback."""
        png = self.plot().png()
        html = image_html(png, title(self.comparison)) + self.summary_html()
        return {"text/plain": repr(self), "text/html": html, "image/png": png}

    def _ipython_display_(self) -> None:
        """Show nothing if the cell already shows the result; else leave it to the bundle."""
        shell = get_ipython()
        if shell is None or shell.execution_count != self.shown_in_cell:
            raise NotImplementedError  # makes IPython use the bundle
