"""``%ddp_panel``: joins the controls, the session and the figure (kernel).

A kernel has one panel; shown in two cells, it is the same in both.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.history.comparison import Comparison, overlay
from ddpnb.magics.panel_form import Form
from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.errors import UserError
from ddpnb.reports.display import LiveDisplay
from ddpnb.reports.figures.figure import LiveFigure
from ddpnb.reports.live import RedrawThrottle, picture_bundle, table_bundle
from ddpnb.reports.progress import progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.session.background import RunningComparison
from ddpnb.session.comparison import ComparisonSpec
from ddpnb.session.errors import ANSI, render_error
from ddpnb.session.session import this_session

MAX_STORED = 200
"""How many stored runs can be selected, the newest."""
WITHOUT_KERNEL = "The panel needs its kernel: run the cell again. Its figure and table are below."


@final
class Panel:
    """Controls that compare strategies in the background.

    Args:
        shell: the notebook's IPython; the controls are refreshed after each cell.
        parse: parses a line of ``%ddp_compare`` and the cell below it.
        own_cell: returns the latest cell that defined a task; empty if there is none.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        *,
        parse: Callable[[str, str], ComparisonSpec],
        own_cell: Callable[[], str],
    ) -> None:
        self._shell = shell
        self._parse = parse
        self._own_cell = own_cell
        self._output = PanelOutput()
        self._context = contextvars.copy_context()
        self._form = Form(
            on_change=self._show_magic,
            on_run=self._run,
            on_stop=self._stop,
            on_select=self._select,
        )
        shell.events.register("post_run_cell", self._refresh)

    def show(self) -> None:
        """Appear under the current cell."""
        self._context = contextvars.copy_context()  # so that a click prints under this cell
        self._refresh()
        bundle = self._form.root._repr_mimebundle_()
        display(bundle | {"text/plain": WITHOUT_KERNEL}, raw=True)
        self._output.show()

    def close(self) -> None:
        """Disconnect from the notebook; may be called twice."""
        if self._refresh in self._shell.events.callbacks["post_run_cell"]:
            self._shell.events.unregister("post_run_cell", self._refresh)
        self._form.root.close()

    def _refresh(self, _: Any = None) -> None:
        """Offer the ranks, the cell and the stored runs that there are now."""
        try:
            stored = this_session().addresses()[:MAX_STORED]
        except UserError:  # training works without the store
            stored = ()
        self._form.offer(
            num_ranks=this_session().num_ranks, has_cell=bool(self._own_cell()), stored=stored
        )
        self._show_magic()

    def _show_magic(self) -> None:
        has_ranks = this_session().num_ranks is not None
        state = self._form.state()
        self._form.show_magic(state.magic(cell=self._own_cell(), has_ranks=has_ranks))

    def _run(self) -> None:
        state = self._form.state()
        cell = self._own_cell() if state.task == CELL_TASK else ""
        try:
            self._context.run(
                this_session().compare_in_background,
                self._parse(state.line(), cell),
                cluster=ClusterSpec(num_ranks=state.num_ranks),
                shown_by=self._output,
                on_end=self._show_end,
            )
        except UserError as error:
            self._form.show_status(str(error), is_error=True)
            return
        self._form.is_training = True
        self._form.show_status("Training; you can run other cells meanwhile.")

    def _stop(self) -> None:
        running = this_session().comparison
        if running is None:
            self._form.show_status("Nothing is training.")
            return
        running.interrupt()
        self._form.show_status("Stopping ...")

    def _select(self, names: tuple[str, ...]) -> None:
        try:
            self._output.select([this_session().store.load(name) for name in names])
        except UserError as error:
            self._form.show_status(str(error), is_error=True)

    def _show_end(self, running: RunningComparison) -> None:
        """Show how a comparison ended; called in its thread."""
        self._form.is_training = False
        error = running.error
        if running.was_stopped:
            self._form.show_status("Stopped; what was trained is kept.")
        elif error is None:
            name = running.result.comparison.name
            self._form.show_status(
                f"Finished, and stored as {name}: %ddp_plot {name} draws it again."
            )
        else:
            text = str(error) if isinstance(error, UserError) else ANSI.sub("", render_error(error))
            self._form.show_status(text, is_error=True)
        self._refresh()


NOTHING_YET = "Run trains the selected strategies; their figure and table appear here."


@final
class PanelOutput:
    """The figure and table under the panel: the latest comparison and the selected runs."""

    def __init__(self) -> None:
        self._picture = LiveDisplay()
        self._line = LiveDisplay()
        self._lock = threading.Lock()  # the training's thread and the controls both draw
        self._figure = LiveFigure()
        self._current: Comparison | None = None
        self._selected: tuple[Comparison, ...] = ()
        self._is_training = False
        self._throttle = RedrawThrottle()

    def show(self) -> None:
        """Appear under the current cell, also if it already stands under another."""
        self._picture.appear({"text/plain": "", "text/html": ""})
        self._line.appear({"text/plain": NOTHING_YET, "text/html": f"<p>{NOTHING_YET}</p>"})

    def select(self, comparisons: Sequence[Comparison]) -> None:
        """Draw stored runs with the latest comparison."""
        with self._lock:
            self._selected = tuple(comparisons)
            self._figure = LiveFigure()  # with the room that their labels need
            if not self._is_training:
                self._show_result()

    def begin(self, comparison: Comparison) -> None:
        """Draw for the first time; this takes longest, so it comes before the training."""
        with self._lock:
            self._figure = LiveFigure()
            self._current, self._is_training = comparison, True
            self._show_progress(comparison)

    def is_due(self) -> bool:
        """Return whether it is time to draw."""
        return self._throttle.is_due()

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        with self._lock:
            self._current = comparison
            self._throttle.draw(lambda: self._show_progress(comparison))

    def finish(self, result: ComparisonResult) -> None:
        """Draw for the last time, and replace the progress by the table."""
        with self._lock:
            self._current, self._is_training = result.comparison, False
            self._show_result()

    def _comparisons(self) -> list[Comparison]:
        return [*([] if self._current is None else [self._current]), *self._selected]

    def _draw(self) -> None:
        self._figure.update(overlay(self._comparisons()))
        self._picture.show(picture_bundle(self._figure.png(), repr(self._figure)))

    def _show_progress(self, comparison: Comparison) -> None:
        self._draw()
        progress = progress_of(comparison)
        self._line.show({"text/html": progress.html(), "text/plain": repr(progress)})

    def _show_result(self) -> None:
        if self._comparisons():
            self._draw()
            self._line.show(table_bundle(ComparisonResult(overlay(self._comparisons()))))
