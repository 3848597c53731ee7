"""How do the controls, the session and the figure work together?  (Notebook side.)

There is one panel a kernel: shown twice, it shows the same twice.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.magics.panel_form import Form
from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.errors import UserError
from ddpnb.reports.display import LiveDisplay
from ddpnb.reports.figures.figure import LiveFigure
from ddpnb.reports.live import RedrawThrottle, picture_bundle, table_bundle
from ddpnb.reports.progress import progress_of
from ddpnb.reports.result import ComparisonResult
from ddpnb.runs.comparison import Comparison, overlay
from ddpnb.session.background import RunningComparison
from ddpnb.session.comparison import ComparisonSpec
from ddpnb.session.errors import ANSI, render_error
from ddpnb.session.session import this_session

NOTHING_YET = "Run trains the chosen strategies; their figure and table appear here."


@final
class Stage:
    """Shows what the panel trains, with stored runs beside it; one comparison after the other."""

    def __init__(self) -> None:
        self._picture = LiveDisplay()
        self._line = LiveDisplay()
        self._lock = threading.Lock()  # the training draws, and so does who chooses runs
        self._figure = LiveFigure()
        self._current: Comparison | None = None
        self._beside: tuple[Comparison, ...] = ()
        self._is_training = False
        self._throttle = RedrawThrottle()

    def show(self) -> None:
        """Appear under the current cell; where it stands already, in both places."""
        self._picture.appear({"text/plain": "", "text/html": ""})
        self._line.appear({"text/plain": NOTHING_YET, "text/html": f"<p>{NOTHING_YET}</p>"})

    def put_beside(self, comparisons: Sequence[Comparison]) -> None:
        """Draw stored runs with what is trained."""
        with self._lock:
            self._beside = tuple(comparisons)
            self._figure = LiveFigure()  # makes room for their labels, and no more
            if not self._is_training:
                self._show_result()

    def begin(self, comparison: Comparison) -> None:
        """Draw for the first time, which costs most, while no training pays for it."""
        with self._lock:
            self._figure = LiveFigure()
            self._current, self._is_training = comparison, True
            self._show_progress(comparison)

    def is_due(self) -> bool:
        """Tell whether it is time to draw."""
        return self._throttle.is_due()

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        with self._lock:
            self._current = comparison
            self._throttle.draw(lambda: self._show_progress(comparison))

    def finish(self, result: ComparisonResult) -> None:
        """Show the figure for the last time, and the table in place of the progress."""
        with self._lock:
            self._current, self._is_training = result.comparison, False
            self._show_result()

    def _parts(self) -> list[Comparison]:
        return [*([] if self._current is None else [self._current]), *self._beside]

    def _draw(self) -> None:
        self._figure.update(overlay(self._parts()))
        self._picture.show(picture_bundle(self._figure.png(), repr(self._figure)))

    def _show_progress(self, comparison: Comparison) -> None:
        self._draw()
        progress = progress_of(comparison)
        self._line.show({"text/html": progress.html(), "text/plain": repr(progress)})

    def _show_result(self) -> None:
        if self._parts():
            self._draw()
            self._line.show(table_bundle(ComparisonResult(overlay(self._parts()))))


MAX_STORED = 200
"""How many stored runs are offered, the newest."""
WITHOUT_KERNEL = "The panel needs its kernel: run the cell again. Its figure and table stand below."


@final
class Panel:
    """Controls to compare strategies, that do not block the notebook.

    Args:
        shell: the notebook's IPython; after each cell, the panel looks what is new.
        parse: reads a line of ``%ddp_compare``, and the cell below it.
        own_cell: returns the latest cell that defined a task, or nothing.
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
        self._stage = Stage()
        self._context = contextvars.copy_context()
        self._form = Form(
            changed=self._show_magic, run=self._run, stop=self._stop, chose=self._overlay
        )
        shell.events.register("post_run_cell", self._look)

    def show(self) -> None:
        """Appear under the current cell."""
        self._context = contextvars.copy_context()  # output of a click belongs to this cell
        self._look()
        bundle = self._form.root._repr_mimebundle_()
        display(bundle | {"text/plain": WITHOUT_KERNEL}, raw=True)
        self._stage.show()

    def close(self) -> None:
        """Look at no cell any more; may be called twice."""
        if self._look in self._shell.events.callbacks["post_run_cell"]:
            self._shell.events.unregister("post_run_cell", self._look)
        self._form.root.close()

    def _look(self, _: Any = None) -> None:
        """Offer what there is now."""
        try:
            stored = this_session().pairs()[:MAX_STORED]
        except UserError:  # a store that cannot be read offers nothing; training works
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
                shown_by=self._stage,
                on_end=self._note_end,
            )
        except UserError as error:
            self._form.tell(str(error), is_error=True)
            return
        self._form.is_training = True
        self._form.tell("It trains; cells run meanwhile.")

    def _stop(self) -> None:
        running = this_session().comparison
        if running is None:
            self._form.tell("Nothing trains.")
            return
        running.interrupt()
        self._form.tell("Stopping ...")

    def _overlay(self, names: tuple[str, ...]) -> None:
        try:
            self._stage.put_beside([this_session().store.load(name) for name in names])
        except UserError as error:
            self._form.tell(str(error), is_error=True)

    def _note_end(self, running: RunningComparison) -> None:
        """Say how a comparison ended; called in its thread."""
        self._form.is_training = False
        error = running.error
        if running.was_stopped:
            self._form.tell("Stopped; what was trained is kept.")
        elif error is None:
            name = running.result.comparison.name
            self._form.tell(f"Finished, and stored as {name}: %ddp_plot {name} draws it again.")
        else:
            text = str(error) if isinstance(error, UserError) else ANSI.sub("", render_error(error))
            self._form.tell(text, is_error=True)
        self._look()
