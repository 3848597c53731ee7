"""Measures how costs grow with ranks, with the length of a run, and with the number of runs.

The order of growth is the slope of log(cost) over log(number); 1 is linear.  It is fitted to the
upper half of the numbers, because constant costs hide it in the lower half.
"""

import contextlib
import io
import os
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import ddpnb
from benchmarks import ranks as many_ranks
from benchmarks.draw import Fed
from benchmarks.measure import Figure
from ddpnb.protocol.messages import RunSpec
from ddpnb.results.model import Status
from ddpnb.results.recorder import Recorder
from ddpnb.results.store import FILE_NAME, Store, runs_folder
from ddpnb.session.session import only_session

RANKS = (2, 8, 32, 64)
STEPS = (1_000, 10_000, 100_000, 1_000_000)
RUNS = (10, 100, 1_000, 10_000)
LINEAR = "<= 1.1"


def measure(part: str = "all") -> list[Figure]:
    """Measure the growth with ``ranks``, ``steps``, ``runs``, or all."""
    parts: dict[str, Callable[[], list[Figure]]] = {
        "ranks": with_ranks,
        "steps": with_steps,
        "runs": with_runs,
    }
    return [figure for name, found in parts.items() if part in (name, "all") for figure in found()]


def order(name: str, of: str, unit: str, costs: Mapping[int, float]) -> Figure:
    """Return the order of growth as a figure, with the costs in its note."""
    numbers = sorted(costs)
    upper = numbers[len(numbers) // 2 - 1 :]
    slope, _ = np.polyfit(np.log(upper), np.log([costs[each] for each in upper]), 1)
    note = ", ".join(f"{each:,}: {costs[each]:.3g} {unit}" for each in numbers)
    text = f"{name}: order of growth with the number of {of}"
    return Figure(name=text, unit="", ours=[slope], limit=LINEAR, note=note)


def with_ranks() -> list[Figure]:
    found = many_ranks.measure("+".join(map(str, RANKS)))
    costs: dict[str, dict[int, float]] = {}
    for figure in found:
        name, _, number = figure.name.rpartition(" (")
        costs.setdefault(name, {})[int(number.split()[0])] = figure.value
    return [order(name, "ranks", "s", each) for name, each in costs.items()]


def with_steps() -> list[Figure]:
    redraw, memory, stored = {}, {}, {}
    for num in STEPS:
        with TemporaryDirectory() as folder:
            tracemalloc.start()
            fed = Fed(Path(folder), 4 * num)
            for spec in fed.specs:
                fed.train(spec, np.random.default_rng(0), draws=False)
            memory[num] = tracemalloc.get_traced_memory()[0] / 1e6
            tracemalloc.stop()
            for _ in range(5):
                fed.draw()
            redraw[num] = float(np.median(fed.draw_seconds))
            fed.store.close()
            stored[num] = (Path(folder) / FILE_NAME).stat().st_size / 1e6
    return [
        order("processor time of a redraw", "steps in each of 4 runs", "s of CPU", redraw),
        order("memory of the kernel", "steps in each of 4 runs", "MB", memory),
        order("size of the store", "steps in each of 4 runs", "MB", stored),
    ]


def with_runs() -> list[Figure]:
    listed, drawn, begun = {}, {}, {}
    before = Path.cwd()
    for num in RUNS:
        with TemporaryDirectory() as folder:
            os.chdir(folder)
            only_session.cache_clear()
            store = Store(runs_folder())
            _fill(store, num)
            with contextlib.redirect_stdout(io.StringIO()):
                listed[num] = _seconds(lambda: ddpnb.runs().text())
                drawn[num] = _seconds(lambda: ddpnb.plot().plot())
            begun[num] = _seconds(lambda: _fill(store, 1))  # noqa: B023  called at once
            store.close()
            os.chdir(before)
    only_session.cache_clear()
    return [
        order("time of %ddp_runs", "stored runs", "s", listed),
        order("time of %ddp_plot", "stored runs", "s", drawn),
        order("time to store one more run", "stored runs", "s", begun),
    ]


def _fill(store: Store, num_runs: int) -> None:
    """Store runs of one batch each, in comparisons of four runs."""
    with TemporaryDirectory() as folder:
        fed = Fed(Path(folder), 4_000)
        batch = fed.batch(fed.specs[0], 0, 0, np.random.default_rng(0))
        fed.store.close()
    for first in range(0, num_runs, 4):
        specs = [
            RunSpec(run_id=f"{time.monotonic_ns():x}{index}", strategy="single", task="digits")
            for index in range(min(4, num_runs - first))
        ]
        recorder = Recorder(store, name="", task="digits", source="", specs=specs)
        for spec in specs:
            recorder.begin(spec.run_id, spec.strategy, spec)
            recorder.add(replace(batch, run_id=spec.run_id))
            recorder.end(spec.run_id, Status.FINISHED)


def _seconds(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)
