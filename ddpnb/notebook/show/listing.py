"""Which ranks are there, and which runs are stored?  (Notebook side.)"""

import time
from collections.abc import Sequence

from ddpnb.notebook.record.names import StoredRun
from ddpnb.notebook.record.runs import ending
from ddpnb.notebook.show.table import Cell, Column, Table
from ddpnb.notebook.show.theme import style_of
from ddpnb.notebook.show.words import NOTHING, counted
from ddpnb.wire import RankState


def ranks_table(states: Sequence[RankState]) -> Table:
    """Return where each rank lives and what it computes with."""
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
            Column(title="notes", is_prose=True),
        ),
        rows=tuple(_rank_row(state, ordered) for state in ordered),
    )


def runs_table(runs: Sequence[StoredRun]) -> Table:
    """Return the stored runs, newest first; repeats of one strategy share a line."""
    newest_first = sorted(runs, key=lambda run: (-run.created, run.comparison, run.name))
    by_name: dict[tuple[str, str], list[StoredRun]] = {}
    for run in newest_first:
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
            Column(title="begun"),
            Column(title="state", is_prose=True),
        ),
        rows=tuple(_run_row(repeats) for repeats in by_name.values()),
        notes=(
            "steps: of all workers, over all repeats",
            "%ddp_plot NAME ... draws them; the part after the slash stands for the latest",
        )
        if runs
        else ("%%ddp_compare trains and stores some",),
    )


def _rank_row(state: RankState, states: Sequence[RankState]) -> tuple[Cell, ...]:
    return (
        Cell(text=str(state.rank)),
        Cell(text=str(state.pid)),
        Cell(text=state.host),
        Cell(text=state.device, quiet=state.device_name),
        Cell(text=str(state.num_threads)),
        Cell(text=state.backend),
        Cell(text=_shared(state, states)),
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
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
    return (
        Cell(text=f"{run.comparison}/{run.name}", dot=style.colour, is_hollow=style.is_hollow),
        Cell(text=str(len(repeats))),
        Cell(text="own cell" if run.task == "cell" else run.task or NOTHING),
        Cell(text=f"{run.spec.batch_size:,}" if run.spec else NOTHING),
        Cell(text=str(run.num_workers or NOTHING)),
        Cell(text=f"{sum(repeat.num_events for repeat in repeats):,}"),
        Cell(text=begun),
        Cell(text="; ".join(endings)),
    )
