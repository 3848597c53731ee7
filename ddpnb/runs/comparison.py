"""What belongs together, and how was it made?  (Notebook side.)"""

import contextlib
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddpnb.protocol.messages import RankState, RunSpec
from ddpnb.runs.model import RunSnapshot

LIBRARIES = ("ddpnb", "torch", "ipyparallel", "numpy")
"""Their versions are kept; none is imported for that."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Several runs at one moment, and what is needed to repeat them."""

    comparison_id: str
    name: str
    created: float = 0.0
    """Seconds since 1970 (UTC)."""
    task: str = ""
    source: str = ""
    """The cell that defines what is trained; empty for a built-in task."""
    specs: tuple[RunSpec, ...] = ()
    """Every training that was asked for, in the order of training."""
    runs: tuple[RunSnapshot, ...] = ()
    """Every training that has begun."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names asked for or logged, each once, in order."""
        asked = [spec.strategy for spec in self.specs]
        return tuple(dict.fromkeys(asked + [run.name for run in self.runs]))

    def with_runs(self, runs: Sequence[RunSnapshot]) -> "Comparison":
        """Return the same comparison at another moment."""
        return replace(self, runs=tuple(runs))


def overlay(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the runs of several comparisons as one, each run once."""
    assert comparisons, "nothing to overlay"
    if len(comparisons) == 1:
        return comparisons[0]
    runs = {run.run_id: run for comparison in comparisons for run in comparison.runs}
    return Comparison(
        comparison_id="+".join(comparison.comparison_id for comparison in comparisons),
        name=", ".join(dict.fromkeys(comparison.name for comparison in comparisons)),
        created=max(comparison.created for comparison in comparisons),
        task=_the_same([comparison.task for comparison in comparisons]),
        source=_the_same([comparison.source for comparison in comparisons]),
        runs=tuple(runs.values()),
        environment=_shared([comparison.environment for comparison in comparisons]),
    )


def environment() -> dict[str, str]:
    """Return where a comparison runs, with the versions of what is installed."""
    installed = {}
    for library in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            installed[library] = version(library)
    return {
        **installed,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "CPU": cpu_model(),
        "CPU cores": str(os.cpu_count() or "unknown"),
    }


def cpu_model() -> str:
    """Return the name of the processor, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def circumstances(states: Sequence[RankState]) -> dict[str, str]:
    """Return with how many ranks a comparison runs, on what, and how they talk."""
    devices = Counter(state.device_name for state in states if state.device != "cpu")
    return {
        "ranks": str(len(states)),
        "GPUs": ", ".join(f"{number} {name}" for name, number in devices.items()) or "none",
        "threads of each rank": _each(str(state.num_threads) for state in states),
        "backend": _each(state.backend for state in states),
    }


def _each(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))


def _the_same(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ""


def _shared(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what all agree on."""
    first, *others = environments
    return {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
