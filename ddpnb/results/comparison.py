"""Combines runs with their environment and the cell that trains them.  Runs in the kernel."""

import contextlib
import platform
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from ddpnb.compat.probe import version_of
from ddpnb.protocol.catalogue import BASELINE, CELL_TASK
from ddpnb.protocol.cores import describe_cores
from ddpnb.protocol.messages import RankState, RunSpec
from ddpnb.protocol.options import Option, options_of
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.results.run import RunSnapshot
from ddpnb.results.tuning import split

LIBRARIES = ("ddpnb", "torch", "ipyparallel", "numpy")
"""Libraries for which ``environment`` includes the version."""

ALWAYS = ("num_epochs", "batch_size", "learning_rate", "momentum", "seed")
"""Options that are always written into a cell, because their defaults may change."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Snapshots of several runs, and everything needed to repeat the runs."""

    comparison_id: str
    name: str
    created: float = 0.0
    """Seconds since 1970 (UTC)."""
    task: str = ""
    source: str = ""
    """The cell that defines the task; empty for a built-in task."""
    specs: tuple[RunSpec, ...] = ()
    """All requested runs, in the order of training."""
    runs: tuple[RunSnapshot, ...] = ()
    """The runs that have begun and are compared."""
    other_rates: tuple[RunSnapshot, ...] = ()
    """The runs at learning rates that ``tuning`` did not choose for their strategies."""
    environment: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    """Keys of ``environment`` that differ between overlaid comparisons."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names of all runs in order, without duplicates."""
        names = [spec.strategy for spec in self.specs] + [run.name for run in self.runs]
        return tuple(dict.fromkeys(names))

    @property
    def all_runs(self) -> tuple[RunSnapshot, ...]:
        """All runs that have begun, in the order of their start."""
        if not self.other_rates:
            return self.runs
        return tuple(sorted((*self.runs, *self.other_rates), key=lambda run: run.created))

    def with_runs(self, runs: Sequence[RunSnapshot]) -> "Comparison":
        """Return a copy of this comparison that has ``runs`` instead of its present runs."""
        compared, other_rates = split(runs)
        return replace(self, runs=compared, other_rates=other_rates)


def overlay(comparisons: Sequence[Comparison]) -> Comparison:
    """Return one comparison that contains each run of several comparisons exactly once."""
    assert comparisons, "nothing to overlay"
    if len(comparisons) == 1:
        return comparisons[0]
    runs = {run.run_id: run for comparison in comparisons for run in comparison.all_runs}
    environments = [comparison.environment for comparison in comparisons]
    differing = tuple(
        key
        for key in dict.fromkeys(chain(*environments))
        if len({each.get(key) for each in environments}) > 1
    )
    return Comparison(
        comparison_id="+".join(comparison.comparison_id for comparison in comparisons),
        name=", ".join(dict.fromkeys(comparison.name for comparison in comparisons)),
        created=max(comparison.created for comparison in comparisons),
        environment={k: v for k, v in environments[0].items() if k not in differing},
        differing=differing,
    ).with_runs(list(runs.values()))


def environment() -> dict[str, str]:
    """Return the properties of this machine and the versions of the installed libraries."""
    return {
        **{library: version_of(library) for library in LIBRARIES},
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "CPU": _cpu_model(),
        "CPU cores": describe_cores(),
    }


def describe_ranks(states: Sequence[RankState]) -> dict[str, str]:
    """Return the number of ranks, their hosts (if several), devices, threads and backend."""
    gpus = {(each.host, each.device): each for each in states if each.device != "cpu"}
    devices = Counter(f"{each.device_name} ({each.gpu_software})" for each in gpus.values())
    hosts = Counter(state.host for state in states)
    several = {"hosts": ",".join(f"{host}:{num}" for host, num in hosts.items())}
    return {
        "ranks": str(len(states)),
        **(several if len(hosts) > 1 else {}),
        "GPUs": ", ".join(f"{number} {name}" for name, number in devices.items()) or "none",
        "threads of each rank": _distinct(str(state.num_threads) for state in states),
        "backend": _distinct(state.backend for state in states),
    }


def magic_of(comparison: Comparison) -> str:
    """Return the cell that trains a comparison again; empty for hand-written loops and overlays."""
    specs = [spec for spec in comparison.specs if not spec.is_ceiling]
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
    strategies: Sequence[str], task: str, choices: Sequence[str], *, num_repeats: int = 1
) -> str:
    """Return the arguments of ``%ddp_compare`` as a line.

    Args:
        strategies: the strategies as users write them; ``single`` is the baseline.
        task: the task that the strategies train.
        choices: words of the line that set options of the training.
        num_repeats: number of runs of each strategy.
    """
    others = [strategy for strategy in strategies if strategy != BASELINE]
    words = others or list(strategies)
    if task != CELL_TASK:
        words += ["--task", task]
    words += choices
    if num_repeats != 1:
        words += ["--repeats", str(num_repeats)]
    if others and BASELINE not in strategies:
        words += ["--no-baseline"]
    return shlex.join(words)


def body_of(source: str) -> str:
    """Return a stored cell without its first line, the comment that ddpnb wrote for the magic."""
    first, _, rest = source.partition("\n")
    return rest if first.startswith("# %%ddp_compare") else source


def chosen(spec: RunSpec) -> Iterator[tuple[str, Option]]:
    """Yield the name and the ``Option`` of each field whose value is not the default."""
    for name, option in options_of(TrainingSpec).items():
        if getattr(spec, name) != option.default:
            yield name, option


def _cpu_model() -> str:
    """Return the name of the processor; empty if it is unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # not macOS
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True).strip()
    return platform.processor() or platform.machine()


def _distinct(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))


def _words(spec: RunSpec) -> list[str]:
    always = {name: option for name, option in options_of(TrainingSpec).items() if name in ALWAYS}
    words = always | dict(chosen(spec))
    for name in ("task", "batch_size" if spec.batch_per_worker is not None else ""):
        words.pop(name, None)
    values = {name: getattr(spec, name) for name in words} | {"learning_rate": spec.rate_words}
    return [word for name, option in words.items() for word in option.words(values[name])]
