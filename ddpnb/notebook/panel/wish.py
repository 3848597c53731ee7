"""What do the controls ask for, and which magic asks for the same?  (Notebook side.)"""

from collections.abc import Mapping
from dataclasses import dataclass

from ddpnb.catalogue import CELL_TASK
from ddpnb.notebook.record.repeat import line_of
from ddpnb.options import Value
from ddpnb.training import training_options


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
