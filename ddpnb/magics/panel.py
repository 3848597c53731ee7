"""``%ddp_panel``: joins the controls, the session and the figure (kernel).

A kernel has one panel; shown in two cells, it is the same in both.
"""

import contextvars
from collections.abc import Callable
from typing import Any, final

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ddpnb.cluster.placement import ClusterSpec
from ddpnb.magics.panel_form import Form
from ddpnb.protocol.catalogue import CELL_TASK
from ddpnb.protocol.errors import UserError
from ddpnb.reports.live import LiveFigureAndTable
from ddpnb.session.background import RunningComparison
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.errors import ANSI, render_error
from ddpnb.session.session import this_session

MAX_STORED = 200
"""How many stored runs can be selected, the newest."""
WITHOUT_KERNEL = "The panel needs its kernel: run the cell again. Its figure and table are below."
NOTHING_YET = "Run trains the selected strategies; their figure appears here."


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
        self._output = LiveFigureAndTable()
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
        self._output.appear(NOTHING_YET)

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
            self._output.put_beside([this_session().store.load(name) for name in names])
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
