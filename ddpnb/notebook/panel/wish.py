"""What do the controls ask for, and which magic asks for the same?  (Notebook side.)"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ddpnb.catalogue import CELL_TASK
from ddpnb.options import Value
from ddpnb.training import training_options

BASELINE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
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
        others = [strategy for strategy in self.strategies if strategy != BASELINE]
        words = others or list(self.strategies)
        if self.task != CELL_TASK:
            words += ["--task", self.task]
        for name, option in training_options():
            chosen = self.choices.get(name, "")
            if isinstance(chosen, str):
                chosen = chosen.replace(" ", "")
            words += option.words(chosen) if chosen != "" else []
        if self.num_repeats != 1:
            words += ["--repeats", str(self.num_repeats)]
        if self.name:
            words += ["--name", self.name]
        if others and BASELINE not in self.strategies:
            words += ["--no-baseline"]
        return shlex.join(words)

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
