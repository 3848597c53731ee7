"""Which magic trains a stored comparison again?  (Notebook side.)"""

import dataclasses
import shlex

from ddpnb.catalogue import CELL_TASK
from ddpnb.notebook.record.comparison import Comparison
from ddpnb.wire import RunSpec

OPTIONS = {
    "num_epochs": "--epochs",
    "batch_size": "--batch-size",
    "learning_rate": "--lr",
    "seed": "--seed",
    "accumulate": "--accumulate",
    "amp": "--amp",
    "clip": "--clip",
    "lr_scaling": "--lr-scaling",
    "num_lr_warmup_epochs": "--lr-warmup",
    "num_data_workers": "--data-workers",
    "sync_batchnorm": "--sync-batchnorm",
    "transport": "--transport",
    "slow": "--slow",
    "kill": "--kill",
    "jitter": "--jitter",
    "save_every": "--save-every",
}
"""The option of ``%ddp_compare`` that each field of a spec comes from."""

ALWAYS = ("num_epochs", "batch_size", "learning_rate", "seed")
"""Fields that are written out even where they are the default, which may change."""

BASELINE = "single"


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


def _given(spec: RunSpec) -> list[str]:
    words = []
    for entry in dataclasses.fields(spec):
        value = getattr(spec, entry.name)
        if entry.name not in OPTIONS or (entry.name not in ALWAYS and value == entry.default):
            continue
        option = OPTIONS[entry.name]
        if value is True:
            words += [option]
        elif isinstance(value, tuple):
            words += [option, ",".join(value)]
        else:
            words += [option, f"{value:.12g}" if isinstance(value, float) else str(value)]
    return words
