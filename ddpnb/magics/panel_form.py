"""Which controls are there, and what do they say?  (Notebook side.)

Each has a label, and works with the keyboard alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, final

import ipywidgets as widgets

from ddpnb.cluster.placement import MAX_RANKS
from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS
from ddpnb.protocol.options import Option, Value
from ddpnb.protocol.training_options import training_options
from ddpnb.runs.repeat import line_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FormState:
    """What the controls say; what they do not offer is as in ``%ddp_compare``."""

    strategies: tuple[str, ...]
    """As they are written in the magic; ``single`` among them is the baseline."""
    task: str
    num_ranks: int
    choices: Mapping[str, Value]
    """By the fields of ``TrainingSpec``; a text is as the magic takes it, an empty one is none."""
    num_repeats: int = 1
    name: str = ""

    def line(self) -> str:
        """Return the line of ``%ddp_compare``, without its name."""
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
        """Return a notebook cell that does the same.

        Args:
            cell: what defines the task, where it is the cell's own.
            has_ranks: whether ranks run already, so that none need be started.
        """
        if self.task == CELL_TASK:
            return f"%%ddp_compare {self.line()}\n{cell}"
        start = "" if has_ranks else f"%ddp_start -n {self.num_ranks}\n"
        return f"{start}%ddp_compare {self.line()}"


CHOSEN_AT_FIRST = ("single", "ddp", "async")
NUM_RANKS_AT_FIRST = 2
AT_FIRST = {"num_epochs": 6.0, "learning_rate": 0.02}
"""Choices that the panel does not begin with at their defaults."""
FIELD = {"width": "21em"}
LABEL = {"description_width": "8.5em"}
OWN_CELL = "own cell"


@final
class Form:
    """The controls; holds no results.

    Args:
        changed: called after each change of a control.
        run: called when Run is pressed.
        stop: called when Stop is pressed.
        chose: called with the names of the stored runs that are chosen.
    """

    def __init__(
        self,
        *,
        changed: Callable[[], None],
        run: Callable[[], None],
        stop: Callable[[], None],
        chose: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._task = widgets.Dropdown(
            options=list(TASKS),
            **_told("task", "what is trained; a %%ddp_compare cell adds one"),
        )
        self._strategies = {
            name: widgets.Checkbox(
                value=name in CHOSEN_AT_FIRST,
                description=name,
                indent=False,
                layout={"width": "auto", "margin": "0 1.2em 0 0"},
            )
            for name in STRATEGIES
        }
        self._more = widgets.Text(
            placeholder="ddp:option=value", **_told("with options", "strategies with their options")
        )
        self._ranks = widgets.BoundedIntText(
            value=NUM_RANKS_AT_FIRST,
            min=1,
            max=MAX_RANKS,
            **_told("ranks", "how many are started where no cluster runs"),
        )
        self._choices = {
            name: _control(option, AT_FIRST.get(name, option.default))
            for name, option in training_options()
            if option.label
        }
        self._repeats = widgets.BoundedIntText(
            value=1, min=1, max=1000, **_told("repeats", "how often each strategy is trained")
        )
        self._name = widgets.Text(
            placeholder="made from the task", **_told("name", "what the comparison is stored as")
        )
        self._stored = widgets.SelectMultiple(
            rows=8,
            description="stored runs",
            tooltip="those chosen are drawn beside what is trained",
            style=LABEL,
            layout={"width": "26em"},
        )
        self._magic = widgets.Textarea(
            rows=3,
            description="as a magic",
            tooltip="a cell that does the same, to copy",
            style=LABEL,
            layout={"width": "60em", "max_width": "99%"},
        )
        self._run = widgets.Button(description="Run", tooltip="train the chosen strategies")
        self._stop = widgets.Button(
            description="Stop", tooltip="end what trains; keep what was trained"
        )
        self._status = widgets.HTML(layout={"margin": "0 0 0 1em"})
        self.root = self._placed()
        for control in self._settings():
            control.observe(lambda _: changed(), names="value")
        self._stored.observe(lambda change: chose(change["new"]), names="value")
        self._run.on_click(lambda _: run())
        self._stop.on_click(lambda _: stop())
        self.is_training = False

    def state(self) -> FormState:
        """Return what the controls say."""
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
        """Whether Stop is the button to press next; both can be pressed at any time."""
        return bool(self._stop.button_style)

    @is_training.setter
    def is_training(self, is_training: bool) -> None:
        # A button that is disabled while it has the focus would leave the keyboard nowhere.
        self._run.button_style = "" if is_training else "primary"
        self._stop.button_style = "danger" if is_training else ""

    def show_magic(self, text: str) -> None:
        """Show the cell that does the same."""
        self._magic.value = text

    def tell(self, text: str, *, is_error: bool = False) -> None:
        """Say how it stands; a screen reader says it too."""
        role, style = ("alert", "font-weight:600") if is_error else ("status", "")
        self._status.value = (
            f'<div role="{role}" style="white-space:pre-wrap;{style}">{escape(text)}</div>'
        )

    def offer(self, *, num_ranks: int | None, has_cell: bool, stored: Sequence[str]) -> None:
        """Offer what there is now: the ranks that run, the user's cell, the stored runs."""
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
        """Return the controls that the magic's line is made of."""
        boxes, choices = self._strategies.values(), self._choices.values()
        others = [self._task, self._more, self._ranks, self._repeats, self._name]
        return [*boxes, *choices, *others]

    def _placed(self) -> Any:
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
                _explained(),
                widgets.HBox(columns, layout=wrapped),
                self._magic,
                widgets.HBox(buttons, layout=wrapped | {"align_items": "center"}),
            ]
        )


def _control(option: Option, value: Any) -> Any:
    """Return the control of a choice that begins with a value."""
    said = _told(option.label, option.meaning)
    if option.choices:
        return widgets.Dropdown(options=option.choices, value=value, **said)
    kinds = {bool: widgets.Checkbox, int: widgets.IntText, float: widgets.FloatText}
    if value is not None and option.value_kind in kinds and option.from_text is None:
        return kinds[option.value_kind](value=value, **said)
    return widgets.Text(placeholder=option.example, **said)


def _told(description: str, tip: str) -> dict[str, Any]:
    return {"description": description, "tooltip": tip, "layout": FIELD, "style": LABEL}


def _explained() -> Any:
    """Return what each strategy is, folded away."""
    lines = "<br>".join(f"{name}: {escape(entry.about)}" for name, entry in STRATEGIES.items())
    return widgets.HTML(
        f'<details style="line-height:1.5"><summary>what they are</summary>{lines}</details>'
    )
