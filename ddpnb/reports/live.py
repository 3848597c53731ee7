"""Displays with content that changes: live figures, tables, progress bars.  Runs in the kernel."""

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, final
from uuid import uuid4

from IPython.core.getipython import get_ipython

from ddpnb.protocol.errors import summary_of
from ddpnb.reports.formatting import title
from ddpnb.reports.kit import Picture
from ddpnb.reports.notebook import CELL, show, warn
from ddpnb.reports.progress import Progress, progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import QUIET, Table
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import strategy_rows

Bundle = Mapping[str, Any]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
BLANK: Bundle = {"text/plain": "", "text/html": ""}
COMES_BACK = "If you reload the page, run %ddp_plot to show this again."
REDRAW_SECONDS, MAX_PAUSE_SECONDS = 0.5, 2.5
"""Minimum and maximum number of seconds between two redraws."""
MAX_SHARE = 0.05
"""Maximum share of one core's time that redraws may use."""


def live(options: PlotOptions = EVERYTHING) -> "Live":
    """Return the display of a comparison: a figure in a Jupyter kernel, otherwise printed text."""
    in_kernel = hasattr(get_ipython(), "kernel")
    return LiveFigureAndTable(options) if in_kernel else LiveText()


class LiveDisplay:
    """A display with replaceable content.  The display appears when ``show`` is first called."""

    def __init__(self) -> None:
        self._id = ""
        self._content: Bundle = BLANK

    def appear(self) -> bool:
        """Also show the content under the current cell.  Return False if nothing was shown yet."""
        if self._id:
            show(self._content, name=self._id)
        return bool(self._id)

    def show(self, bundle: Bundle, metadata: Mapping[str, Any] | None = None) -> None:
        """Replace the content with a MIME bundle.  This has no effect outside IPython."""
        if get_ipython() is None:
            return
        self._content = bundle
        is_shown, self._id = bool(self._id), self._id or uuid4().hex
        show(bundle, metadata, name=self._id, update=is_shown)

    def show_text(self, text: str) -> None:
        """Replace the content with a text."""
        self.show({"text/plain": text})

    def show_table(self, table: Table | Progress) -> None:
        """Replace the content with a table or a line of progress."""
        self.show({"text/html": table.html(), "text/plain": repr(table)})


class Live(ABC):
    """Shows a comparison while it trains, and limits the number of redraws."""

    def __init__(self) -> None:
        self._next_seconds = 0.0
        self._has_failed = False

    @abstractmethod
    def announce(self, text: str) -> None:
        """Show a text until there is a figure.  If the text is ``""``, show nothing."""

    @abstractmethod
    def show_progress(self, comparison: Comparison) -> None:
        """Draw the current state of the comparison."""

    @abstractmethod
    def show(self, result: ComparisonResult) -> None:
        """Draw the result of the comparison."""

    def is_due(self) -> bool:
        """Return True if enough time has passed for the next redraw."""
        return time.monotonic() >= self._next_seconds

    def update(self, comparison: Comparison) -> None:
        """Show the current state of a comparison, and set the time of the next redraw."""
        began = time.thread_time()
        self._guard(lambda: self.show_progress(comparison))
        pause = (time.thread_time() - began) / MAX_SHARE
        self._next_seconds = time.monotonic() + min(max(pause, REDRAW_SECONDS), MAX_PAUSE_SECONDS)

    def finish(self, result: ComparisonResult) -> None:
        """Replace the progress with the result."""
        self._guard(lambda: self.show(result))

    def _guard(self, drawing: Callable[[], object]) -> None:
        """Call ``drawing``.  On failure, print a message (only once) and continue the training."""
        try:
            drawing()
        except Exception as error:  # noqa: BLE001  matplotlib may raise any error
            if not self._has_failed:
                self._has_failed = True
                warn(
                    f"The figure cannot be drawn, because of this error: {summary_of(error)}. "
                    "The training continues, and ddpnb stores its results."
                )


@final
class LiveFigureAndTable(Live):
    """Shows progress and a figure during training, then the sentence, figure and table."""

    def __init__(self, options: PlotOptions = EVERYTHING) -> None:
        super().__init__()
        self._options = options
        self._line, self._figure, self._table = LiveDisplay(), LiveDisplay(), LiveDisplay()

    def appear(self, text: str = "") -> None:
        """Show everything under the current cell, even if another cell already shows it.

        Args:
            text: the text to show if there is no content yet.
        """
        if not self._line.appear():
            self.announce(text)
            return
        self._figure.appear()
        self._table.appear()

    def announce(self, text: str) -> None:
        """Show a text until there is a figure.  If the text is ``""``, show nothing."""
        self._line.show({"text/plain": text, "text/html": f"<p>{escape(text)}</p>"})
        quiet = f'<p style="{QUIET}">{COMES_BACK}</p>'
        self._figure.show({"text/plain": COMES_BACK, "text/html": quiet} if text else BLANK)
        self._table.show(BLANK)

    def show_progress(self, comparison: Comparison) -> None:
        """Show the line of progress and the figure."""
        from ddpnb.reports.figures.figure import draw  # noqa: PLC0415  matplotlib: 0.3 s

        self._line.show_table(progress_of(comparison, COMES_BACK))
        rows = strategy_rows(comparison, self._options.target)
        figure = draw(comparison, rows, self._options, is_live=True)
        self._show_figure(Picture(figure, title(comparison)))

    def show(self, result: ComparisonResult) -> None:
        """Show a result: sentence, figure and table.  Store the cell's number in the result."""
        shell = get_ipython()
        is_other = CELL.get() is not None  # the cell that runs now did not begin this work
        result.shown_in_cell = None if shell is None or is_other else shell.execution_count
        self._line.show({"text/html": result.sentence_html(), "text/plain": result.sentence()})
        self._show_figure(result.plot())
        self._table.show({"text/html": result.table_html(), "text/plain": repr(result)})

    def _show_figure(self, picture: Picture) -> None:
        """Show a figure, or its description if the frontend cannot show pictures."""
        png = base64.b64encode(picture.png()).decode()
        self._figure.show({"image/png": png, "text/plain": repr(picture)})


@final
class LiveText(Live):
    """Prints a line when a run begins, and the table at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._num_runs = 0

    def announce(self, text: str) -> None:
        """Print a text about the current work."""
        if text:
            warn(text)

    def show_progress(self, comparison: Comparison) -> None:
        """Print the name of the current run, if it has just begun."""
        runs = comparison.all_runs
        if len(runs) > self._num_runs:
            self.announce(f"run {len(runs)} of {len(comparison.specs)}: {runs[-1].name}")
        self._num_runs = len(runs)

    def show(self, result: ComparisonResult) -> None:
        """Print the sentence and the table."""
        print(result)
