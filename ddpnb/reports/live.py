"""A comparison under its cell while it trains (kernel)."""

import base64
import sys
import time
from collections.abc import Callable
from typing import Protocol, final

import psutil
from IPython.core.getipython import get_ipython

from ddpnb.history.comparison import Comparison
from ddpnb.reports.display import Bundle, LiveDisplay, is_chosen, show_canvas
from ddpnb.reports.progress import progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import EVERYTHING, PlotOptions

REDRAW_SECONDS = 0.5
"""The shortest time between two redraws."""

MAX_SHARE = 0.1
"""The share of a core's time that redraws may take: two redraws a second cost about 7 %."""

BUSY_SHARE, BUSY_PERCENT = 0.03, 80.0
"""The share where all cores together are busier than this."""

MAX_PAUSE_SECONDS = 2.5
"""The longest pause: costly pictures, such as the first of a run, are rare."""


class Live(Protocol):
    """Shows a comparison while it trains."""

    def begin(self, comparison: Comparison) -> None:
        """Show the planned runs, before anything trains."""

    def is_due(self) -> bool:
        """Return whether the next update is due."""

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""

    def finish(self, result: ComparisonResult) -> None:
        """Show the result; nothing replaces it."""


def live(options: PlotOptions = EVERYTHING) -> Live:
    """Return a live display: a figure in a Jupyter kernel, lines of text elsewhere."""
    in_kernel = hasattr(get_ipython(), "kernel")
    return LiveFigureAndTable(options) if in_kernel else LiveText()


@final
class RedrawThrottle:
    """Spaces redraws, so that they take a small share of this process's time.

    The share is smaller where training keeps all cores busy, because drawing slows it there.

    Args:
        now: a monotonic clock.
        spent: a clock of the processor time of the drawing thread.
        busy: returns how busy all cores have been since the last call, in percent.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
        busy: Callable[[], float] = psutil.cpu_percent,
    ) -> None:
        self._now, self._spent, self._busy = now, spent, busy
        self._next_seconds = 0.0
        busy()

    def is_due(self) -> bool:
        """Return whether the next redraw is due."""
        return self._now() >= self._next_seconds

    def draw(self, drawing: Callable[[], None]) -> None:
        """Draw, then set the pause that keeps drawing within its share."""
        began = self._spent()
        drawing()
        share = MAX_SHARE if self._busy() < BUSY_PERCENT else BUSY_SHARE
        pause = (self._spent() - began) / share
        self._next_seconds = self._now() + min(max(pause, REDRAW_SECONDS), MAX_PAUSE_SECONDS)


@final
class LiveFigureAndTable:
    """One figure and one line of progress, redrawn in place.

    At the end the table replaces the line, so that a saved notebook holds one PNG and one
    HTML table.
    """

    def __init__(self, options: PlotOptions = EVERYTHING) -> None:
        from ddpnb.reports.figures.figure import LiveFigure  # noqa: PLC0415  matplotlib: 0.3 s

        self._figure = LiveFigure(options)
        self._picture = LiveDisplay()
        self._line = LiveDisplay()
        self._throttle = RedrawThrottle()

    def begin(self, comparison: Comparison) -> None:
        """Draw the first picture, the costliest, before training begins."""
        self._show(comparison)

    def is_due(self) -> bool:
        """Return whether the next redraw is due."""
        return self._throttle.is_due()

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        self._throttle.draw(lambda: self._show(comparison))

    def finish(self, result: ComparisonResult) -> None:
        """Show the last picture, and the table in place of the progress."""
        self._draw(result.comparison)
        self._line.show(table_bundle(result))
        show_canvas_if_chosen(result)
        mark_shown(result)

    def _show(self, comparison: Comparison) -> None:
        self._draw(comparison)
        progress = progress_of(comparison)
        self._line.show({"text/html": progress.html(), "text/plain": repr(progress)})

    def _draw(self, comparison: Comparison) -> None:
        self._figure.update(comparison)
        self._picture.show(picture_bundle(self._figure.png(), repr(self._figure)))


@final
class LiveText:
    """One line of progress, rewritten on a terminal; the table at the end."""

    def __init__(self) -> None:
        self._last_run = ""
        self._next_seconds = 0.0

    def begin(self, comparison: Comparison) -> None:
        """Write nothing yet."""

    def is_due(self) -> bool:
        """Return whether the line is due to be rewritten."""
        return time.monotonic() >= self._next_seconds

    def update(self, comparison: Comparison) -> None:
        """Rewrite the line; in a file, write one line per run."""
        self._next_seconds = time.monotonic() + REDRAW_SECONDS
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{progress_of(comparison)!r}")
        elif comparison.runs and comparison.runs[-1].run_id != self._last_run:
            self._last_run = comparison.runs[-1].run_id
            run, number = comparison.runs[-1], len(comparison.runs)
            sys.stderr.write(f"run {number} of {len(comparison.specs)}: {run.name}\n")
        sys.stderr.flush()

    def finish(self, result: ComparisonResult) -> None:
        """Write the table."""
        sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
        print(result)


def show_result(result: ComparisonResult) -> None:
    """Show a result's figure and table under the current cell."""
    LiveDisplay().show(picture_bundle(result.plot().png(), result.sentence()))
    LiveDisplay().show(table_bundle(result))
    show_canvas_if_chosen(result)
    mark_shown(result)


def show_canvas_if_chosen(result: ComparisonResult) -> None:
    """Show the figure again, interactive, if ``%matplotlib widget`` was run."""
    if is_chosen():
        show_canvas(result.plot().figure, result.comparison.name)


def picture_bundle(png: bytes, description: str) -> Bundle:
    """Return a PNG as a MIME bundle, with a text for frontends that show no pictures."""
    return {"image/png": base64.b64encode(png).decode(), "text/plain": description}


def table_bundle(result: ComparisonResult) -> Bundle:
    """Return a result's table and sentence as a MIME bundle."""
    return {"text/html": result.summary_html(), "text/plain": repr(result)}


def mark_shown(result: ComparisonResult) -> None:
    """Note that the current cell already shows the result."""
    shell = get_ipython()
    result.shown_in_cell = None if shell is None else shell.execution_count
