"""Which magic trains a stored comparison again?  (Notebook side.)"""

import dataclasses
import shlex
from collections.abc import Iterator

from ddpnb.catalogue import BASELINE, CELL_TASK
from ddpnb.notebook.record.comparison import Comparison
from ddpnb.training import Flag, flags
from ddpnb.wire import RunSpec

ALWAYS = ("num_epochs", "batch_size", "learning_rate", "seed")
"""Fields that are written out even where they are the default, which may change."""


def magic_of(comparison: Comparison) -> str:
    """Return the notebook cell that trains a comparison again.

    Empty for hand-written loops, and where several comparisons were put together.
    """
    specs = comparison.specs
    if not specs:
        return ""
    strategies = tuple(dict.fromkeys(spec.strategy for spec in specs))
    first = specs[0]
    words = [name for name in strategies if name != BASELINE] or list(strategies)
    if first.task != CELL_TASK:
        words += ["--task", first.task]
    words += _given(first)
    if (num_repeats := max(spec.repeat for spec in specs) + 1) > 1:
        words += ["--repeats", str(num_repeats)]
    if BASELINE not in strategies:
        words += ["--no-baseline"]
    line = shlex.join(words)
    if first.task != CELL_TASK:
        return f"%ddp_compare {line}"
    return f"%%ddp_compare {line}\n{body_of(first.source)}"


def body_of(source: str) -> str:
    """Return a stored cell without the comment that stands for its magic's line."""
    first, _, rest = source.partition("\n")
    return rest if first.startswith("# %%ddp_compare") else source


def chosen(spec: RunSpec) -> Iterator[tuple[str, Flag]]:
    """Yield the fields of a spec that are other than where nothing is chosen."""
    defaults = {entry.name: entry.default for entry in dataclasses.fields(spec)}
    for name, flag in flags():
        if getattr(spec, name) != defaults[name]:
            yield name, flag


def _given(spec: RunSpec) -> list[str]:
    words = []
    told = {name: flag for name, flag in flags() if name in ALWAYS} | dict(chosen(spec))
    for name, flag in told.items():
        value = getattr(spec, name)
        if name == "task":
            continue
        if name == "resume" and spec.resumed:  # the comparison: each strategy resumes its own run
            words += [flag.option, spec.resumed.partition("/")[0]]
        elif value is True:
            words += [flag.option]
        elif isinstance(value, tuple):
            words += [flag.option, ",".join(value)]
        else:
            words += [flag.option, f"{value:.12g}" if isinstance(value, float) else str(value)]
    return words
