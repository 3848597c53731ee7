"""What is redrawn under a cell: a comparison while it trains, its table, progress bars (kernel)."""

import base64
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, final

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from ddpnb.history.comparison import Comparison, overlay
from ddpnb.reports.drawing import REDRAW_SECONDS, DrawingGuard, RedrawThrottle
from ddpnb.reports.progress import Progress, progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.reports.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddpnb.reports.figures.figure import LiveFigure

Bundle = Mapping[str, Any]

CHECKING = "Checking the model, the data and each strategy on all ranks ..."

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

WIDTH_PIXELS = 900
"""The width of the canvas, which, unlike a picture, does not shrink to fit its cell."""

BACKENDS = ("ipympl", "widget", "module://ipympl.backend_nbagg")
"""The names of the backend that ``%matplotlib widget`` chooses."""


def live(options: PlotOptions = EVERYTHING) -> "Live":
    """Return a live display: a figure in a Jupyter kernel, lines of text elsewhere."""
    in_kernel = hasattr(get_ipython(), "kernel")
    return LiveFigureAndTable(options, on_end=_end_cell) if in_kernel else LiveText()


def show_result(result: ComparisonResult) -> None:
    """Show a result's figure and table under the current cell."""
    LiveDisplay().show_picture(result.plot().png(), result.sentence())
    LiveDisplay().show_summary(result)
    _end_cell(result)


def _end_cell(result: ComparisonResult) -> None:
    """Note that the current cell shows the result, on ipympl's canvas too if that was chosen."""
    if _canvas_is_chosen():
        _show_canvas(result.plot().figure, result.comparison.name)
    shell = get_ipython()
    result.shown_in_cell = None if shell is None else shell.execution_count


@final
class LiveFigureAndTable:
    """One figure and one line of progress, redrawn in place.

    At the end the table replaces the line, so that a saved notebook holds one PNG and one
    HTML table.

    Args:
        options: how the comparison is drawn.
        on_end: called with the result, once it is shown.
    """

    def __init__(
        self,
        options: PlotOptions = EVERYTHING,
        on_end: Callable[[ComparisonResult], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._on_end = on_end
        self._figure: LiveFigure | None = None
        """Made at the first drawing, with the room that its labels need."""
        self._picture = LiveDisplay()
        self._line = LiveDisplay()
        self._throttle = RedrawThrottle()
        self._guard = DrawingGuard()
        self._lock = threading.Lock()  # a training's thread and a panel's controls both draw
        self._is_training = False
        self._latest: tuple[Comparison, ...] = ()
        self._beside: tuple[Comparison, ...] = ()

    def appear(self, text: str) -> None:
        """Appear under the current cell, also if it already stands under another.

        Args:
            text: shown until there is a figure.
        """
        self._picture.appear({"text/plain": "", "text/html": ""})
        self._line.appear({"text/plain": text, "text/html": f"<p>{text}</p>"})

    def announced(self) -> Self:
        """Say that a comparison is being checked, which takes some seconds at first."""
        self.appear(CHECKING)
        return self

    def vanish(self) -> None:
        """Show nothing any more."""
        for each in (self._picture, self._line):
            each.show({"text/plain": "", "text/html": ""})

    def put_beside(self, comparisons: Sequence[Comparison]) -> None:
        """Draw stored runs with the latest comparison."""
        with self._lock:
            self._beside = tuple(comparisons)
            self._figure = None
            if not self._is_training:
                self._show_result()

    def begin(self, comparison: Comparison) -> None:
        """Draw the first picture, the costliest, before training begins."""
        with self._lock:
            self._figure = None
            self._is_training = True
            self._show_progress(comparison)

    def is_due(self) -> bool:
        """Return whether the next redraw is due."""
        return self._throttle.is_due()

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        with self._lock:
            self._throttle.draw(lambda: self._show_progress(comparison))

    def finish(self, result: ComparisonResult) -> None:
        """Show the last picture, and the table in place of the progress."""
        with self._lock:
            self._latest, self._is_training = (result.comparison,), False
            if self._figure is not None and self._figure.lacks_panels(self._all()):
                self._figure = None  # a larger one, once nothing moves any more
            self._show_result()
        self._guard.draw(lambda: self._on_end(result))

    def _show_progress(self, comparison: Comparison) -> None:
        self._latest = (comparison,)
        self._guard.draw(self._draw)
        self._guard.draw(lambda: self._line.show_table(progress_of(comparison)))

    def _show_result(self) -> None:
        if self._latest or self._beside:
            self._guard.draw(self._draw)
            all_runs = ComparisonResult(self._all(), self._options)
            self._guard.draw(lambda: self._line.show_summary(all_runs))

    def _all(self) -> Comparison:
        return overlay([*self._latest, *self._beside])

    def _draw(self) -> None:
        from ddpnb.reports.figures.figure import LiveFigure  # noqa: PLC0415  matplotlib: 0.3 s

        figure, self._figure = self._figure, None  # one that cannot be drawn is made anew
        if figure is None:
            figure = LiveFigure(self._all(), self._options)
        else:
            figure.update(self._all())
        self._picture.show_picture(figure.png(), repr(figure))
        self._figure = figure


@final
class LiveText:
    """One line of progress, rewritten on a terminal; the table at the end."""

    def __init__(self) -> None:
        self._last_run = ""
        self._next_seconds = 0.0
        self._guard = DrawingGuard()

    def announced(self) -> Self:
        """Write on a terminal that a comparison is being checked."""
        if sys.stderr.isatty():
            sys.stderr.write(CHECKING)
            sys.stderr.flush()
        return self

    def vanish(self) -> None:
        """Clear the line on a terminal."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")

    def begin(self, comparison: Comparison) -> None:
        """Write nothing yet."""

    def is_due(self) -> bool:
        """Return whether the line is due to be rewritten."""
        return time.monotonic() >= self._next_seconds

    def update(self, comparison: Comparison) -> None:
        """Rewrite the line; in a file, write one line per run."""
        self._next_seconds = time.monotonic() + REDRAW_SECONDS
        if sys.stderr.isatty():
            self._guard.draw(lambda: sys.stderr.write(f"\r\x1b[K{progress_of(comparison)!r}"))
        elif (runs := comparison.all_runs) and runs[-1].run_id != self._last_run:
            self._last_run = runs[-1].run_id
            number, num_planned = len(runs), len(comparison.specs)
            sys.stderr.write(f"run {number} of {num_planned}: {runs[-1].name}\n")
        sys.stderr.flush()

    def finish(self, result: ComparisonResult) -> None:
        """Write the table."""
        sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
        self._guard.draw(lambda: print(result))


Live = LiveFigureAndTable | LiveText
"""Shows a comparison while it trains."""


class LiveDisplay:
    """A display whose content can be replaced; it appears with its first content."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._content: Bundle = {}

    def appear(self, bundle: Bundle) -> None:
        """Appear under the current cell too; all copies show the same content.

        Args:
            bundle: the first content, used if there is none yet.
        """
        if self._handle is None:
            self.show(bundle)
        else:
            self._handle.display(self._content, raw=True)

    def show(self, bundle: Bundle, metadata: Mapping[str, Any] | None = None) -> None:
        """Show a MIME bundle in place of the last one; outside IPython, do nothing."""
        if get_ipython() is None:
            return
        self._content = bundle
        options = {"raw": True, "metadata": metadata or {}}
        if self._handle is None:
            self._handle = display(bundle, display_id=True, **options)
        else:
            self._handle.update(bundle, **options)

    def show_text(self, text: str) -> None:
        """Show a text in place of the last content."""
        self.show({"text/plain": text})

    def show_table(self, table: Table | Progress) -> None:
        """Show a table, or a line of progress, in place of the last content."""
        self.show({"text/html": table.html(), "text/plain": repr(table)})

    def show_picture(self, png: bytes, description: str) -> None:
        """Show a PNG, with a text for frontends that show no pictures."""
        self.show({"image/png": base64.b64encode(png).decode(), "text/plain": description})

    def show_summary(self, result: ComparisonResult) -> None:
        """Show the table and the sentence of a result."""
        self.show({"text/html": result.summary_html(), "text/plain": repr(result)})


def _canvas_is_chosen() -> bool:
    """Return whether the user chose ipympl's canvas; neither chooses a backend nor loads pyplot."""
    import matplotlib  # noqa: PLC0415 - takes 0.1 s

    chosen = matplotlib.get_backend(auto_select=False)
    in_kernel = hasattr(get_ipython(), "kernel")
    return in_kernel and chosen in BACKENDS and find_spec("ipympl") is not None


def _show_canvas(figure: "Figure", name: str) -> None:
    """Show a figure on ipympl's canvas under the current cell.

    Args:
        figure: a figure shown nowhere else; from now on it belongs to the canvas.
        name: the file name of a download.
    """
    from ipympl.backend_nbagg import Canvas, FigureManager  # noqa: PLC0415 - may not be there

    figure.set_dpi(WIDTH_PIXELS / figure.get_figwidth())
    _clip(figure)
    canvas = Canvas(figure)
    canvas.header_visible = False
    FigureManager(canvas, 0).set_window_title(name)
    text = "The same figure, to zoom and pan in while its kernel runs."
    options = canvas._repr_mimebundle_()[WIDGET_VIEW]
    display({WIDGET_VIEW: options, "text/plain": text}, raw=True)


def _clip(figure: "Figure") -> None:
    """Clip lines to their axes, so that zooming and panning never draws beside them."""
    for axes in figure.axes:
        for line in axes.get_lines():
            if any(line.get_transform().contains_branch_seperately(axes.transData)):
                line.set_clip_on(True)
