"""Tables of ranks, of stored runs, and of the details of one comparison.  Runs in the kernel."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import final

from ddpnb.protocol.messages import RankState, RunSpec
from ddpnb.reports.formatting import NOTHING, counted, notes
from ddpnb.reports.kit import Shown
from ddpnb.reports.style import style_of
from ddpnb.reports.table import Cell, Column, Table, table_row
from ddpnb.results.comparison import Comparison, magic_of
from ddpnb.results.frames import strategy_rows
from ddpnb.results.query import StoredRun
from ddpnb.results.run import ending


def ranks_table(states: Sequence[RankState], doing: Mapping[int, str] | None = None) -> Table:
    """Return a table with one row per rank, with the rank's activity if ``doing`` is given."""
    ordered = sorted(states, key=lambda state: state.rank)
    return Table(
        caption=f"{counted(len(ordered), 'rank')} ready",
        columns=(
            Column(title="rank"),
            Column(title="pid", is_number=True),
            Column(title="host"),
            Column(title="device"),
            Column(title="threads", is_number=True),
            Column(title="backend"),
            Column(title="state" if doing else "notes", is_prose=True),
        ),
        rows=tuple(
            table_row(
                *(state.rank, state.pid, state.host),
                Cell(text=state.device, quiet=state.device_name),
                *(state.num_threads, state.backend),
                doing[state.rank] if doing else _shared(state, ordered),
            )
            for state in ordered
        ),
    )


def runs_table(runs: Sequence[StoredRun]) -> Table:
    """Return a table of ``runs``, last run first.  Repeats of a strategy share one row."""
    by_name: dict[tuple[str, str], list[StoredRun]] = {}
    for run in runs[::-1]:
        by_name.setdefault((run.comparison_id, run.name), []).append(run)
    return Table(
        caption=f"{counted(len(runs), 'stored run')}, newest first" if runs else "No stored runs",
        columns=(
            Column(title="name"),
            Column(title="runs", is_number=True),
            Column(title="task"),
            Column(title="batch", is_number=True),
            Column(title="workers", is_number=True),
            Column(title="steps", is_number=True),
            Column(title="started"),
            Column(title="state", is_prose=True),
        ),
        rows=tuple(_run_row(repeats) for repeats in by_name.values()),
        notes=(
            "steps: number of steps, summed over all workers and repeats",
            "To draw runs, enter %ddp_plot with their names",
            "ddp instead of race/ddp means the latest run of ddp",
        ),
    )


def _shared(state: RankState, states: Sequence[RankState]) -> str:
    if not state.shares_device:
        return ""
    here = (state.host, state.device)
    others = [s.rank for s in states if (s.host, s.device) == here and s.rank != state.rank]
    ranks = ", ".join(map(str, others)) or "others"
    return f"shares {state.device} with rank{'' if len(others) == 1 else 's'} {ranks}"


def _run_row(repeats: Sequence[StoredRun]) -> tuple[Cell, ...]:
    run = repeats[0]
    style = style_of(run.name)
    endings = sorted({ending(repeat.status, repeat.detail) for repeat in repeats})
    if run.spec and run.spec.rates:
        endings.append(f"--lr {run.spec.rate_words}")
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
    return table_row(
        Cell(text=f"{run.comparison}/{run.name}", dot=style.colour, is_hollow=style.is_hollow),
        len(repeats),
        "own cell" if run.task == "cell" else run.task or NOTHING,
        run.spec.batch_words if run.spec else NOTHING,
        run.num_workers or NOTHING,
        f"{sum(repeat.num_events for repeat in repeats):,}",
        started if run.created else NOTHING,
        "; ".join(endings),
    )


HIDDEN = {"run_id", "strategy", "repeat", "is_ceiling", "source", "cell", "models", "rates"}
"""Fields of ``RunSpec`` that the table of settings does not show."""


@final
class Details(Shown):
    """The settings and environment of a comparison, and the code that repeats the comparison."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def text(self) -> str:
        """Return the table and the code as text."""
        return f"{super().text()}\n\n{self._code()}".rstrip()

    def html(self, images: str) -> str:
        """Return the table and the code as HTML."""
        code = self._code()
        return super().html(images) + f"<pre>{escape(code)}</pre>" * bool(code)

    def _code(self) -> str:
        """Return a cell that repeats the comparison, or the cell with the hand-written loop."""
        return magic_of(self.comparison) or self.comparison.source

    def table(self) -> Table:
        """Return a table of the settings and the environment of all runs, with notes."""
        comparison = self.comparison
        specs = comparison.specs or tuple(run.spec for run in comparison.runs if run.spec)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(comparison.created))
        settings = {"started": started, "strategies": " ".join(comparison.strategies)}
        specs = tuple(spec for spec in specs if not spec.is_ceiling) or specs
        for entry in dataclasses.fields(RunSpec):
            if specs and entry.name not in HIDDEN:
                values = dict.fromkeys(_setting_text(getattr(spec, entry.name)) for spec in specs)
                settings[entry.name.removeprefix("num_").replace("_", " ")] = " and ".join(values)
        if specs:
            settings["repeats"] = str(max(spec.repeat for spec in specs) + 1)
        settings |= {f"model of {name}": str(path) for name, path in _models(specs)}
        settings |= comparison.environment
        return Table(
            caption=comparison.name,
            columns=(Column(title="name"), Column(title="value", is_prose=True)),
            rows=tuple(table_row(name, value) for name, value in settings.items()),
            notes=notes(comparison, strategy_rows(comparison)),
        )


def _models(specs: Sequence[RunSpec]) -> Iterator[tuple[str, Path]]:
    """Yield the name of each run that saved its trained model, with the path of the model."""
    for spec in specs:
        path = spec.model_file
        at = f" at lr {spec.learning_rate:g}" if spec.rates and spec.repeat == 0 else ""
        if path is not None and path.is_file():
            yield f"{spec.strategy}#{spec.repeat + 1}{at}", path


def _setting_text(value: object) -> str:
    if value in (None, "", ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
