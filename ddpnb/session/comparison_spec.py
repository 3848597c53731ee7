"""The specification of a comparison, and the list of its runs.  Runs in the kernel."""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddpnb.protocol.catalogue import BASELINE, CEILING, CELL_TASK, STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.notation import parse_strategy
from ddpnb.protocol.options import as_kind, check_options, option, read_options
from ddpnb.protocol.training_options import TrainingSpec, make_training_spec
from ddpnb.reports.notebook import write
from ddpnb.reports.style import EVERYTHING, PlotOptions
from ddpnb.results.recorder import new_id
from ddpnb.session.variables import NotebookFunctions

MAGIC = re.compile(r"([\w\s,]+=\s*)?[%!]")
"""Matches lines that only IPython understands: ``%magic``, ``!command``, ``x = !command``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """The strategies to compare, and the training options that all strategies share."""

    strategies: tuple[str, ...]
    """The strategies as the user writes them: ``"ddp"`` or ``"ddp:hook=fp16"``."""
    training: TrainingSpec
    num_repeats: int = option(
        1, "number of runs of each strategy; strategies take turns", flag="--repeats", least=1
    )
    name: str = option("", "name of the stored comparison; default: the task name", example="NAME")
    baseline: bool = option(
        True,
        "do not add the strategies single (baseline) and no-comm (upper bound)",
        flag="--no-baseline",
    )
    wait: bool = option(True, "return at once and train in the background", flag="--no-wait")
    options: PlotOptions = EVERYTHING
    functions: NotebookFunctions | None = None
    """The notebook's functions that ``training.source`` loads.  None if the source is a cell."""

    def __post_init__(self) -> None:
        check_options(self)
        if not self.strategies:
            names = ", ".join(STRATEGIES)
            raise UserError(f"Name the strategies to compare, one or more of: {names}.")
        for strategy in self.strategies:
            _check_device(strategy, self.training)
        task = self.training.task
        if task != CELL_TASK and self.training.source.strip():
            raise UserError(f"Use either --task {task} or a cell that defines the task, not both.")
        refuse_magics(self.training.source)

    def run_specs(self, models: Path | None = None) -> tuple[RunSpec, ...]:
        """Return the specifications of all runs.  ``models`` is the folder for trained weights.

        For fairness, strategies take turns, and each repeat begins with a different strategy.
        Within a repeat, all strategies use the same seed.  Weights, sample order and dropout
        differ between repeats, but the data are the same.

        If the user asks for several learning rates, the first repeat trains with each rate.  When
        a later repeat begins, ``RunningComparison`` replaces the rate by the strategy's best rate.
        """
        added = [BASELINE] if self.baseline else []
        if self.baseline and not {BASELINE, CEILING}.issuperset(self.strategies):
            added.append(CEILING)
        names = list(dict.fromkeys([*added, *self.strategies]))
        seed = self.training.seed
        folder = str(models) if self.training.save and models else ""
        chosen = asdict(self.training) | {"comparison_id": new_id()}
        ceiling = chosen | {"is_ceiling": True, "save": False, "kill": (), "rates": ()}
        rates = self.training.rates or (self.training.learning_rate,)
        seeds = [(seed + repeat) % 2**63 for repeat in range(self.num_repeats)]
        turns = [(0, rate) for rate in rates]
        turns += [(repeat, rates[0]) for repeat in range(1, self.num_repeats)]
        return tuple(
            RunSpec(
                run_id=new_id(),
                strategy=name,
                repeat=repeat,
                models="" if is_ceiling else folder,
                **(ceiling if is_ceiling else chosen)
                | {"seed": seeds[repeat], "learning_rate": rate},
            )
            for turn, (repeat, rate) in enumerate(turns)
            for position in range(len(names))
            for name in [names[(position + turn) % len(names)]]
            for is_ceiling in [name == CEILING and name not in self.strategies]
            if not is_ceiling or repeat > 0 or rate == rates[0]
        )


def make_comparison(
    strategies: Sequence[str],
    choices: Mapping[str, Any],
    *,
    source: str,
    cell: int = 0,
    functions: NotebookFunctions | None = None,
) -> ComparisonSpec:
    """Return the comparison that the user chose; raise UserError if a choice is impossible.

    Args:
        strategies: strategies as the user writes them.
        choices: a dict from each option's Python name to its value, a string or an object.
        source: the cell that defines the task, or the cell that loads ``functions``.
        cell: the cell's number, the ``n`` of ``In [n]``.
        functions: the functions passed to ``ddpnb.compare``.
    """
    own = read_options(ComparisonSpec, choices)
    options = PlotOptions(**read_options(PlotOptions, choices))
    return ComparisonSpec(
        strategies=tuple(as_kind("each of strategies", each, str) for each in strategies),
        training=make_training_spec(choices, source=source, cell=cell),
        options=options,
        functions=functions,
        **own,
    )


def _check_device(strategy: str, training: TrainingSpec) -> None:
    """Raise UserError if a strategy cannot run on the emulated devices of a training."""
    choice = parse_strategy(strategy)
    if choice.name not in STRATEGIES or not (training.is_emulated or training.link):
        return
    needs = "shared memory" if STRATEGIES[choice.name].needs_shared_memory else ""
    if choice.options.get("threads") == "all":
        needs = "the threads of all ranks"
    if needs:
        given = "Use --devices real" if training.is_emulated else "Remove --link"
        raise UserError(
            f"{strategy} needs {needs}, so it cannot run on emulated devices. "
            f"{given}, or remove {strategy} from the comparison."
        )


def refuse_magics(source: str) -> None:
    """Raise UserError if a comparison's cell has a line that only IPython understands."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        lines, number = source.splitlines(), error.lineno or 0
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        if MAGIC.match(line):
            raise UserError(
                f"Line {number} of the cell ({line}) is not Python. A comparison's cell can only "
                "contain Python. Move this line to another cell, or to a %%ddp cell for the ranks."
            ) from None
    except ValueError:  # a null byte: the ranks will reject the cell
        return


def long_enough(specs: Sequence[RunSpec], num_epochs: float) -> tuple[RunSpec, ...]:
    """Increase the epochs of all runs to ``num_epochs`` (``--min-seconds``); print a message."""
    asked = max((spec.num_epochs for spec in specs), default=0.0)
    if num_epochs <= asked:
        return tuple(specs)
    rounded = math.ceil(num_epochs) if num_epochs > 10 else math.ceil(10 * num_epochs) / 10
    write(
        "stdout",
        f"Training for {rounded:g} epochs instead of {asked:g}, so that each run takes at least "
        f"{specs[0].min_seconds:g} s.\n",
    )
    return tuple(replace(spec, num_epochs=float(rounded)) for spec in specs)
