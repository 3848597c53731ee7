"""The controls of ``%ddp_panel``, which start and stop comparisons in the background.

A kernel has one panel.  If two cells show the panel, both show the same controls.  Each control
has a label and can be used with the keyboard.  Runs in the kernel.
"""

import contextvars
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any, final

import ipywidgets as widgets
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.cluster.placement import MAX_RANKS, ClusterSpec
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.options import options_of
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.live import WIDGET_VIEW, LiveFigureAndTable
from ddpnb.reports.notebook import CELL, current_cell, show
from ddpnb.results.comparison import body_of, line_of
from ddpnb.session.comparison_spec import ComparisonSpec
from ddpnb.session.errors import ANSI, render_error
from ddpnb.session.session import this_session
from ddpnb.session.training import RunningComparison

CHOSEN = ("single", "ddp", "async")
CONTROLS = ("num_epochs", "batch_size", "devices", "link", "slow")
"""The options of a training that have a control."""
DEFAULTS = {"num_epochs": "6", "batch_size": "64"}
"""The panel's initial values that differ from the defaults of ``%ddp_compare``."""
WITHOUT_KERNEL = "The panel needs a kernel. Run this cell again. The last results are below."
WRAPPED = {"flex_flow": "row wrap", "align_items": "center", "max_width": "99%"}


@final
class Panel:
    """Controls for comparisons.  ``parse`` parses the line and the cell of ``%%ddp_compare``."""

    def __init__(
        self, shell: InteractiveShell, parse: Callable[[str, str], ComparisonSpec]
    ) -> None:
        self._shell, self._parse = shell, parse
        self._own_cell = ""  # the latest cell that defined a task
        self._output = LiveFigureAndTable()
        self._context = contextvars.copy_context()
        box = partial(_control, widgets.Checkbox, width="auto", indent=False)
        count = partial(_control, widgets.BoundedIntText, min=1)
        text = partial(_control, widgets.Text, continuous_update=False)
        # The browser sends a text when the user leaves the field, so before a click on Run.
        self.strategies = {
            name: box(name, entry.about, value=name in CHOSEN) for name, entry in STRATEGIES.items()
        }
        tasks = [(name, name) for name in TASKS]
        self.task = _control(widgets.Dropdown, "task", "task to train", options=tasks)
        self.ranks = count("ranks", "number of ranks to start", value=2, max=MAX_RANKS)
        self.repeats = count("repeats", "number of runs per strategy", value=1, max=1000)
        self.choices = {
            each.flag: text(
                each.keyword.replace("_", " "),
                each.about,
                value=DEFAULTS.get(name, ""),
                placeholder=each.example,
            )
            for name, each in options_of(TrainingSpec, *CONTROLS).items()
        }
        self.magic = _control(widgets.Textarea, "as a magic", "copy this", width="60em", rows=3)
        self.run = widgets.Button(description="Run", tooltip="train the selected strategies")
        self.stop = widgets.Button(description="Stop", tooltip="stop and keep the results")
        self.status = widgets.HTML(layout={"margin": "0 0 0 1em"})
        settings = [self.task, self.ranks, self.repeats, *self.choices.values()]
        boxes = [widgets.HTML("<b>strategies</b>&emsp;"), *self.strategies.values()]
        rows = [boxes, settings, [self.magic], [self.run, self.stop, self.status]]
        self._root = widgets.VBox([widgets.HBox(row, layout=WRAPPED) for row in rows])
        for control in (*self.strategies.values(), *settings):
            control.observe(lambda _: self._show_magic(), names="value")
        self.run.on_click(lambda _: self._run())
        self.stop.on_click(lambda _: self._stop())
        shell.events.register("post_run_cell", self._refresh)

    def show(self) -> None:
        """Show the panel under the current cell."""
        self._context.run(CELL.set, current_cell())  # so that a click prints under this cell
        self._refresh()
        view = {"version_major": 2, "version_minor": 0, "model_id": self._root.model_id}
        show({WIDGET_VIEW: view, "text/plain": WITHOUT_KERNEL})
        self._output.appear("Click Run to train the selected strategies. The figure appears here.")

    def close(self) -> None:
        """Disconnect the panel from the notebook; may be called twice."""
        if self._refresh in self._shell.events.callbacks["post_run_cell"]:
            self._shell.events.unregister("post_run_cell", self._refresh)
        self._root.close()

    def line(self) -> str:
        """Return the arguments of ``%ddp_compare`` that the controls describe."""
        texts = {flag: box.value.replace(" ", "") for flag, box in self.choices.items()}
        words = [word for flag, text in texts.items() if text for word in (flag, text)]
        strategies = [name for name, box in self.strategies.items() if box.value]
        return line_of(strategies, self.task.value, words, num_repeats=self.repeats.value)

    def _show_magic(self) -> None:
        """Show a cell that has the same effect as the controls, with ``%ddp_start`` if needed."""
        if self.task.value == CELL_TASK:
            self.magic.value = f"%%ddp_compare {self.line()}\n{self._own_cell}"
        else:
            start = "" if self.ranks.disabled else f"%ddp_start -n {self.ranks.value}\n"
            self.magic.value = f"{start}%ddp_compare {self.line()}"

    def _refresh(self, _: Any = None) -> None:
        """Update the number of ranks and the shown cell; highlight the button to press next."""
        is_training = this_session().comparison is not None  # enabled buttons keep the focus
        self.run.button_style = "" if is_training else "primary"
        self.stop.button_style = "danger" if is_training else ""
        num_ranks = this_session().num_ranks
        self.ranks.disabled = num_ranks is not None
        self.ranks.value = num_ranks or self.ranks.value
        trained = this_session().last_training
        self._own_cell = (trained and body_of(trained.source)) or self._own_cell
        if self._own_cell and len(self.task.options) == len(TASKS):
            self.task.options += (("own cell", CELL_TASK),)
            self.task.value = CELL_TASK
        self._show_magic()

    def _run(self) -> None:
        cell = self._own_cell if self.task.value == CELL_TASK else ""
        session = this_session()
        try:
            spec = replace(self._parse(self.line(), cell), wait=False)
            if session.num_ranks is None:
                session.start(ClusterSpec(num_ranks=self.ranks.value), progress=self._say)
            self._say("Training. You can run other cells in the meantime.")
            self._context.run(session.compare, spec, self._output, self._show_end)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  clicks show no traceback
            self._say_error(error)
        self._refresh()

    def _stop(self) -> None:
        if (running := this_session().comparison) is not None:
            running.interrupt()
        self._say("Nothing is training." if running is None else "Stopping ...")

    def _show_end(self, running: RunningComparison) -> None:
        """Show how a comparison ended; called in the comparison's thread."""
        if running.was_stopped:
            self._say("Stopped. The finished steps are stored.")
        elif running.error is not None:
            self._say_error(running.error)
        else:
            name = running.result.comparison.name
            self._say(f"Finished and stored as {name}. Run %ddp_plot {name} to draw it again.")
        self._refresh()

    def _say_error(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, UserError) else ANSI.sub("", render_error(error))
        self._say(text, role="alert")

    def _say(self, text: str, *, role: str = "status") -> None:
        """Show a status line that a screen reader reads aloud."""
        style = "white-space:pre-wrap;line-height:1.5"
        self.status.value = f'<div role="{role}" style="{style}">{escape(text)}</div>'


def _control(kind: Any, label: str, about: str, width: str = "18em", **traits: Any) -> Any:
    layout = {"width": width, "max_width": "99%", "margin": "2px 1em 2px 0"}
    style = {"description_width": "initial" if width == "auto" else "6em"}
    tooltip = "tooltip" if hasattr(kind, "tooltip") else "description_tooltip"  # in ipywidgets 7
    return kind(description=label, layout=layout, style=style, **{tooltip: about}, **traits)
