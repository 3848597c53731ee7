"""The panel's controls (kernel).

Each has a label and can be used with the keyboard alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, final

import ipywidgets as widgets

from ddpnb.cluster.placement import MAX_RANKS
from ddpnb.history.comparison import line_of
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.options import Option, Value
from ddpnb.protocol.training_options import training_options


@dataclass(frozen=True, slots=True, kw_only=True)
class FormState:
    """The values of the controls; all else is as in ``%ddp_compare`` by default."""

    strategies: tuple[str, ...]
    """As the magic takes them; ``single`` is the baseline."""
    task: str
    num_ranks: int
    choices: Mapping[str, Value]
    """By field of ``TrainingSpec``; a text is as the magic takes it, an empty one is left out."""
    num_repeats: int = 1
    name: str = ""

    def line(self) -> str:
        """Return the line of ``%ddp_compare``, without the magic's name."""
        words: list[str] = []
        for name, option in training_options():
            chosen = self.choices.get(name, "")
            if isinstance(chosen, str):
                chosen = chosen.replace(" ", "")
            words += option.words(chosen) if chosen != "" else []
        return line_of(
            self.strategies, self.task, words, num_repeats=self.num_repeats, name=self.name
        )

    def magic(self, *, cell: str, has_ranks: bool) -> str:
        """Return a notebook cell that does the same, and starts ranks unless it ``has_ranks``.

        ``cell`` is the text that defines the task, if that is chosen.
        """
        if self.task == CELL_TASK:
            return f"%%ddp_compare {self.line()}\n{cell}"
        start = "" if has_ranks else f"%ddp_start -n {self.num_ranks}\n"
        return f"{start}%ddp_compare {self.line()}"


DEFAULT_STRATEGIES = ("single", "ddp", "async")
DEFAULT_NUM_RANKS = 2
DEFAULTS = {"num_epochs": 6.0, "batch_size": 64}
"""Where the panel starts from another value than ``%ddp_compare``."""
OWN_CELL = "own cell"


@final
class Form:
    """The controls; holds no results.

    ``on_select`` is called with the names of the selected stored runs.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[], None],
        on_run: Callable[[], None],
        on_stop: Callable[[], None],
        on_select: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._task = widgets.Dropdown(
            options=list(TASKS),
            **_labelled("task", "what to train; a %%ddp_compare cell adds its own task"),
        )
        self._strategies = {
            name: widgets.Checkbox(
                value=name in DEFAULT_STRATEGIES,
                description=name,
                indent=False,
                layout={"width": "auto", "margin": "0 1.2em 0 0"},
            )
            for name in STRATEGIES
        }
        self._more = _text(
            placeholder="ddp:option=value",
            **_labelled("with options", "strategies with their options"),
        )
        self._ranks = widgets.BoundedIntText(
            value=DEFAULT_NUM_RANKS,
            min=1,
            max=MAX_RANKS,
            **_labelled("ranks", "how many to start if no cluster is running"),
        )
        self._choices = {
            name: _control(option, DEFAULTS.get(name, option.default))
            for name, option in training_options()
            if option.label
        }
        self._repeats = widgets.BoundedIntText(
            value=1, min=1, max=1000, **_labelled("repeats", "how often each strategy is trained")
        )
        self._name = _text(
            placeholder="made from the task",
            **_labelled("name", "the name of the stored comparison"),
        )
        self._stored = widgets.SelectMultiple(
            rows=8,
            **_labelled(
                "stored runs",
                "the selected runs are drawn with the latest comparison",
                width="26em",
            ),
        )
        self._magic = widgets.Textarea(
            rows=3, **_labelled("as a magic", "a cell that does the same; copy it", width="60em")
        )
        self._run = widgets.Button(description="Run", tooltip="train the selected strategies")
        self._stop = widgets.Button(
            description="Stop", tooltip="stop training; what was trained is kept"
        )
        self._status = widgets.HTML(layout={"margin": "0 0 0 1em"})
        self.root = self._arranged()
        for control in self._settings():
            control.observe(lambda _: on_change(), names="value")
        self._stored.observe(lambda change: on_select(change["new"]), names="value")
        self._run.on_click(lambda _: on_run())
        self._stop.on_click(lambda _: on_stop())
        self.is_training = False

    def state(self) -> FormState:
        """Return the values of the controls."""
        chosen = [name for name, box in self._strategies.items() if box.value]
        task = self._task.value
        return FormState(
            strategies=(*chosen, *self._more.value.split()),
            task=CELL_TASK if task == OWN_CELL else task,
            num_ranks=self._ranks.value,
            choices={name: control.value for name, control in self._choices.items()},
            num_repeats=self._repeats.value,
            name=self._name.value.strip(),
        )

    @property
    def is_training(self) -> bool:
        """Whether the Stop button is highlighted; both buttons always work."""
        return bool(self._stop.button_style)

    @is_training.setter
    def is_training(self, is_training: bool) -> None:
        # Disabling the button that has the focus would take the focus away from the keyboard.
        self._run.button_style = "" if is_training else "primary"
        self._stop.button_style = "danger" if is_training else ""

    def show_magic(self, text: str) -> None:
        """Show the cell that does the same."""
        self._magic.value = text

    def show_status(self, text: str, *, is_error: bool = False) -> None:
        """Show a line of status, which a screen reader reads aloud."""
        role, style = ("alert", "font-weight:600") if is_error else ("status", "")
        self._status.value = (
            f'<div role="{role}" style="white-space:pre-wrap;{style}">{escape(text)}</div>'
        )

    def offer(self, *, num_ranks: int | None, has_cell: bool, stored: Sequence[str]) -> None:
        """Update what can be chosen: the number of ranks, the user's cell, the stored runs."""
        self._ranks.disabled = num_ranks is not None
        if num_ranks is not None:
            self._ranks.value = num_ranks
        tasks = (*TASKS, *([OWN_CELL] if has_cell else []))
        if self._task.options != tasks:
            is_new = has_cell and OWN_CELL not in self._task.options
            value = OWN_CELL if is_new else self._task.value
            self._task.options = tasks
            self._task.value = value if value in tasks else tasks[0]
        if self._stored.options != tuple(stored):
            kept = tuple(name for name in self._stored.value if name in stored)
            self._stored.options = tuple(stored)
            self._stored.value = kept

    def _settings(self) -> list[Any]:
        """Return the controls that determine the magic's line."""
        boxes, choices = self._strategies.values(), self._choices.values()
        others = [self._task, self._more, self._ranks, self._repeats, self._name]
        return [*boxes, *choices, *others]

    def _arranged(self) -> Any:
        boxes = widgets.HBox(
            [widgets.HTML("<b>strategies</b>&emsp;"), *self._strategies.values()],
            layout={"flex_flow": "row wrap", "align_items": "center", "max_width": "99%"},
        )
        columns = [
            widgets.VBox([self._task, self._ranks, self._more, self._repeats, self._name]),
            widgets.VBox([*self._choices.values()]),
            widgets.VBox([self._stored]),
        ]
        wrapped = {"flex_flow": "row wrap", "max_width": "99%"}
        buttons = [self._run, self._stop, self._status]
        return widgets.VBox(
            [
                boxes,
                _explanations(),
                widgets.HBox(columns, layout=wrapped),
                self._magic,
                widgets.HBox(buttons, layout=wrapped | {"align_items": "center"}),
            ]
        )


def _control(option: Option, value: Any) -> Any:
    """Return the control of an option, set to a value."""
    label = _labelled(option.label, option.meaning)
    if option.choices:
        return widgets.Dropdown(options=option.choices, value=value, **label)
    kinds = {bool: widgets.Checkbox, int: widgets.IntText, float: widgets.FloatText}
    if option.most_values > 1:
        return _text(value=f"{value:g}", **label)
    if value is not None and option.value_kind in kinds and option.from_text is None:
        return kinds[option.value_kind](value=value, **label)
    return _text(placeholder=option.example, **label)


def _text(**traits: Any) -> Any:
    """Return a line of text, sent when it is left.

    Of texts sent at each key, the last waits until the kernel has answered the others: pressing Run
    could overtake it.
    """
    return widgets.Text(continuous_update=False, **traits)


def _labelled(text: str, tooltip: str, width: str = "21em") -> dict[str, Any]:
    layout = {"width": width, "max_width": "99%"}
    style = {"description_width": "8.5em"}
    return {"description": text, "tooltip": tooltip, "layout": layout, "style": style}


def _explanations() -> Any:
    """Return a line about each strategy, folded."""
    lines = "<br>".join(f"{name}: {escape(entry.about)}" for name, entry in STRATEGIES.items())
    return widgets.HTML(
        f'<details style="line-height:1.5"><summary>about the strategies</summary>{lines}</details>'
    )
