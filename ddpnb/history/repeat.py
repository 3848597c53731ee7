"""The magic that trains a stored comparison again.  (Kernel.)"""

import shlex
from collections.abc import Iterator, Sequence

from ddpnb.history.comparison import Comparison
from ddpnb.protocol.catalogue import BASELINE, CELL_TASK
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.options import Option
from ddpnb.protocol.training_options import training_options

ALWAYS = ("num_epochs", "batch_size", "learning_rate", "seed")
"""Fields that are written out even where they have their default, which may change."""


def magic_of(comparison: Comparison) -> str:
    """Return the notebook cell that trains a comparison again.

    Empty for hand-written loops and for several comparisons together.
    """
    specs = comparison.specs
    if not specs:
        return ""
    strategies = tuple(dict.fromkeys(spec.strategy for spec in specs))
    first = specs[0]
    num_repeats = max(spec.repeat for spec in specs) + 1
    line = line_of(strategies, first.task, _words(first), num_repeats=num_repeats)
    if first.task != CELL_TASK:
        return f"%ddp_compare {line}"
    return f"%%ddp_compare {line}\n{body_of(first.source)}"


def line_of(
    strategies: Sequence[str],
    task: str,
    choices: Sequence[str],
    *,
    num_repeats: int = 1,
    name: str = "",
) -> str:
    """Return the arguments of ``%ddp_compare`` as a line.

    Args:
        strategies: as users write them; ``single`` among them is the baseline.
        task: what is trained.
        choices: the words of the line that choose options of the training.
        num_repeats: how often each strategy is trained.
        name: of the comparison; empty: ddpnb makes one.
    """
    others = [strategy for strategy in strategies if strategy != BASELINE]
    words = others or list(strategies)
    if task != CELL_TASK:
        words += ["--task", task]
    words += choices
    if num_repeats != 1:
        words += ["--repeats", str(num_repeats)]
    if name:
        words += ["--name", name]
    if others and BASELINE not in strategies:
        words += ["--no-baseline"]
    return shlex.join(words)


def body_of(source: str) -> str:
    """Return a stored cell without the comment in place of its magic."""
    first, _, rest = source.partition("\n")
    return rest if first.startswith("# %%ddp_compare") else source


def chosen(spec: RunSpec) -> Iterator[tuple[str, Option]]:
    """Yield the fields of a spec that do not have their default, with their options."""
    for name, option in training_options():
        if getattr(spec, name) != option.default:
            yield name, option


def _words(spec: RunSpec) -> list[str]:
    always = {name: option for name, option in training_options() if name in ALWAYS}
    words = []
    for name, option in (always | dict(chosen(spec))).items():
        if name == "resume" and spec.resumed:  # the comparison: each strategy resumes its own run
            words += [option.flag, spec.resumed.partition("/")[0]]
        elif name != "task":
            words += option.words(getattr(spec, name))
    return words
