"""How do the rows of the file become runs and comparisons?  (Notebook side.)"""

import json
import platform
from collections.abc import Mapping
from functools import partial
from typing import Any

from ddpnb.notebook.record import codec
from ddpnb.notebook.record.comparison import Comparison
from ddpnb.notebook.record.database import Database
from ddpnb.notebook.record.names import StoredRun
from ddpnb.notebook.record.runs import Run, RunSnapshot, Status
from ddpnb.processes import is_alive, process_id
from ddpnb.wire import RunHeader, RunReport, RunSpec

LIST = """
SELECT runs.id, comparisons.id, comparisons.name, runs.name, runs.repeat, runs.created,
    comparisons.task, runs.status, runs.detail, runs.writer, runs.spec, runs.header,
    (SELECT coalesce(sum(num_events), 0) FROM batches WHERE run = runs.id),
    (SELECT count(DISTINCT rank) FROM batches WHERE run = runs.id AND rank >= 0)
FROM runs JOIN comparisons ON comparisons.id = runs.comparison
ORDER BY runs.created, runs.rowid
"""

COMPARISON = """
SELECT id, name, created, task, source, specs, environment FROM comparisons WHERE id = ?
"""

BATCHES = """
SELECT run, rank, sequence, num_events, events, metrics, marks
FROM batches WHERE run = ? ORDER BY rowid
"""

REPORTS = "SELECT report FROM reports WHERE run = ? ORDER BY rank"


def read_list(database: Database) -> tuple[StoredRun, ...]:
    """Return what is known of every run but its events, oldest first."""
    return tuple(map(_stored_run, database.read(LIST)))


def read_comparison(database: Database, comparison_id: str) -> Comparison:
    """Return a comparison without its runs."""
    return _comparison(database.read(COMPARISON, (comparison_id,))[0])


def read_run(database: Database, stored: StoredRun, *, keeps_events: bool = False) -> RunSnapshot:
    """Return a run; the events of a long one are read once more when they are asked for."""
    run = Run(
        run_id=stored.run_id,
        name=stored.name,
        comparison=stored.comparison,
        spec=stored.spec,
        created=stored.created,
        num_ranks=stored.num_ranks,
        history=None if keeps_events else partial(read_run, database, stored, keeps_events=True),
    )
    for row in database.read(BATCHES, (stored.run_id,)):
        is_first = row[2] == 0
        run.add(codec.batch_of(row, stored.header if is_first else None))
    for (text,) in database.read(REPORTS, (stored.run_id,)):
        run.add_report(codec.from_text(RunReport, text))
    run.end(stored.status, stored.detail)
    return run.snapshot()


def this_process() -> str:
    """Return host, process id and start time of this process, as the store keeps them."""
    pid, began = process_id()
    return f"{platform.node()} {pid} {began:.2f}"


def _stored_run(row: tuple[Any, ...]) -> StoredRun:
    (run_id, comparison_id, comparison, name, repeat, created, task) = row[:7]
    (status, detail, writer, spec, header, num_events, num_ranks) = row[7:]
    if status == Status.RUNNING and not _is_written(writer):
        status, detail = Status.STOPPED, "its kernel ended; kept up to the last flush"
    return StoredRun(
        run_id=run_id,
        comparison_id=comparison_id,
        comparison=comparison,
        name=name,
        repeat=repeat,
        created=created,
        task=task,
        status=Status(status),
        detail=detail,
        num_events=num_events,
        num_ranks=num_ranks,
        spec=codec.from_text(RunSpec, spec) if spec else None,
        header=codec.from_text(RunHeader, header) if header else None,
    )


def _comparison(row: tuple[Any, ...]) -> Comparison:
    comparison_id, name, created, task, source, specs, environment = row
    versions: Mapping[str, str] = json.loads(environment)
    return Comparison(
        comparison_id=comparison_id,
        name=name,
        created=created,
        task=task,
        source=source,
        specs=codec.specs_from_text(specs),
        environment=versions,
    )


def _is_written(writer: str) -> bool:
    """Return whether the kernel that wrote a run still runs; on another host nobody knows: yes."""
    host, pid, began = writer.rsplit(" ", 2)
    return host != platform.node() or is_alive((int(pid), float(began)))
