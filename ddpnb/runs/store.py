"""How are runs kept for a later kernel, and found again?  (Notebook side.)

Whoever trains begins a comparison and its runs, appends batches as they come,
and finishes; a crash in between loses at most the last ``flush_seconds``.
"""

import json
import platform
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch, RunHeader, RunReport, RunSpec
from ddpnb.protocol.processes import is_alive, process_id
from ddpnb.runs import query, rows
from ddpnb.runs.comparison import Comparison, overlay
from ddpnb.runs.database import Database
from ddpnb.runs.model import Run, RunSnapshot, Status
from ddpnb.runs.query import StoredRun

FILE_NAME = "runs.sqlite3"

MAX_PENDING_BATCHES = 20_000
"""Batches kept while the disk refuses them; those after are lost, and counted as such."""

INSERT_BATCH = """
INSERT OR IGNORE INTO batches SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7
WHERE EXISTS (SELECT 1 FROM runs WHERE id = ?1)
"""
"""A run that another notebook has deleted meanwhile takes nothing more, and does no harm."""


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


@final
class Store:
    """The runs of one folder.

    Every method raises ``StoreError``, one sentence, if the disk refuses; what
    could not be written is kept and tried again at the next call.

    Args:
        folder: where they lie; ``runs_folder()`` finds the project's.
        flush_seconds: how long batches may gather before they are written.
    """

    def __init__(self, folder: Path, *, flush_seconds: float = 1.0) -> None:
        self.folder = folder
        self._database = Database(folder / FILE_NAME)
        self._flush_seconds = flush_seconds
        self._last_flush = time.monotonic()
        self._pending: list[EventBatch] = []
        self._lock = threading.RLock()

    def begin_comparison(self, comparison: Comparison, *, wanted_name: str = "") -> Comparison:
        """Keep a comparison that is about to train; its runs follow by ``begin_run``.

        Args:
            comparison: ``name`` is the stem, e.g. the task, that gets a number.
            wanted_name: the user's own name for it, if given.

        Returns:
            The same comparison with the name it is found by.
        """
        with self._database.write() as connection:
            taken = {name for (name,) in connection.execute("SELECT name FROM comparisons")}
            name = query.free_name(wanted_name, comparison.name, taken)
            connection.execute(
                "INSERT INTO comparisons VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    comparison.comparison_id,
                    name,
                    comparison.created,
                    comparison.task,
                    comparison.source,
                    rows.specs_to_text(comparison.specs),
                    json.dumps(dict(comparison.environment)),
                ),
            )
        return replace(comparison, name=name)

    def begin_run(self, comparison_id: str, run: RunSnapshot) -> None:
        """Keep a run that is about to train within a comparison that has begun."""
        spec = rows.to_text(run.spec) if run.spec else None
        with self._database.write() as connection:
            connection.execute(
                "INSERT INTO runs (id, comparison, name, repeat, created, writer, status, spec)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    run.run_id,
                    comparison_id,
                    run.name,
                    run.repeat,
                    run.created,
                    this_process(),
                    run.status,
                    spec,
                ),
            )

    def append(self, batch: EventBatch) -> None:
        """Keep what a rank flushed; it reaches the disk within ``flush_seconds``."""
        with self._lock:
            if len(self._pending) < MAX_PENDING_BATCHES:
                self._pending.append(batch)
        if time.monotonic() - self._last_flush >= self._flush_seconds:
            self.flush()

    def add_report(self, report: RunReport) -> None:
        """Keep what a rank returned."""
        row = (report.run_id, report.rank, rows.to_text(report))
        with self._database.write() as connection:
            connection.execute("INSERT OR REPLACE INTO reports VALUES (?, ?, ?)", row)

    def finish(self, run_id: str, status: Status, detail: str = "") -> None:
        """Keep how a run ended, and all that is pending."""
        self.flush()
        with self._database.write() as connection:
            connection.execute(
                "UPDATE runs SET status = ?, detail = ? WHERE id = ?",
                (Status(status), detail, run_id),
            )

    def flush(self) -> None:
        """Write what is pending, whole or not at all."""
        with self._lock:
            try:
                if self._pending:
                    self._write(self._pending)
                self._pending.clear()
            finally:  # after a failure too, so that a slow disk is not asked without a pause
                self._last_flush = time.monotonic()

    def list(self) -> tuple[StoredRun, ...]:
        """Return what is known of every run but its events, oldest first."""
        return _read_list(self._database)

    def load(self, *addresses: str) -> Comparison:
        """Return the runs that the names or ids stand for, as one comparison.

        Args:
            addresses: as ``query.resolve`` takes them, e.g. ``"digits-1/ddp"``, ``"mine"``.

        Raises:
            UserError: a name stands for nothing; the closest ones are told.
        """
        self.flush()
        known = self.list()
        return overlay([self._load(query.resolve(address, known)) for address in addresses])

    def rename(self, name: str, new_name: str) -> str:
        """Give the comparison that ``name`` lies in a new name; return it."""
        found = query.resolve(name, self.list())[-1]
        with self._database.write() as connection:
            taken = {taken for (taken,) in connection.execute("SELECT name FROM comparisons")}
            free = query.free_name(new_name, new_name, taken - {found.comparison})
            connection.execute(
                "UPDATE comparisons SET name = ? WHERE id = ?", (free, found.comparison_id)
            )
        return free

    def delete(self, address: str) -> tuple[str, ...]:
        """Forget the runs that ``address`` stands for, and what they saved; return their query.

        Raises:
            UserError: one of them is being trained.
        """
        found = query.resolve(address, self.list())
        if busy := [run.address for run in found if run.status is Status.RUNNING]:
            raise UserError(f"{', '.join(busy)} is being trained; %ddp_interrupt ends that.")
        with self._database.write() as connection:
            connection.executemany("DELETE FROM runs WHERE id = ?", [(r.run_id,) for r in found])
            connection.execute(
                "DELETE FROM comparisons WHERE id NOT IN (SELECT comparison FROM runs)"
                " AND id IN (SELECT value FROM json_each(?))",
                (json.dumps([run.comparison_id for run in found]),),
            )
        for run in found:
            shutil.rmtree(self.checkpoints / run.run_id, ignore_errors=True)
        return tuple(run.address for run in found)

    @property
    def checkpoints(self) -> Path:
        """The folder with one of each run's checkpoints and its trained model."""
        return self.folder / "checkpoints"

    def close(self) -> None:
        """Write what is pending and close; again is no harm."""
        try:
            if self._pending:
                self.flush()
        finally:
            self._pending.clear()
            self._database.close()

    def _load(self, found: tuple[StoredRun, ...]) -> Comparison:
        """Return runs of one comparison, or of several overlaid."""
        parts = []
        for comparison_id in dict.fromkeys(run.comparison_id for run in found):
            own = [run for run in found if run.comparison_id == comparison_id]
            whole = _read_comparison(self._database, comparison_id)
            parts.append(whole.with_runs([_read_run(self._database, run) for run in own]))
        return overlay(parts)

    def _write(self, batches: Sequence[EventBatch]) -> None:
        headers = [(rows.to_text(b.header), b.run_id) for b in batches if b.header is not None]
        with self._database.write() as connection:
            connection.executemany("UPDATE runs SET header = ? WHERE id = ?", headers)
            connection.executemany(INSERT_BATCH, map(rows.batch_row, batches))


def runs_folder(start: Path | None = None) -> Path:
    """Return the folder that runs are stored under; it need not exist.

    It is ``data/runs`` in the project around ``start``: the nearest folder upwards
    that holds ``data/`` beside ``pyproject.toml`` or ``notebooks/``.  Outside a
    project it is ``data/runs`` in ``start`` itself.

    Args:
        start: where to look from; the working directory if not given.
    """
    here = (start or Path.cwd()).resolve()
    project = next((folder for folder in (here, *here.parents) if _is_project(folder)), here)
    return project / "data" / "runs"


def _is_project(folder: Path) -> bool:
    marks = (folder / "pyproject.toml").is_file() or (folder / "notebooks").is_dir()
    return marks and (folder / "data").is_dir()


def _read_list(database: Database) -> tuple[StoredRun, ...]:
    """Return what is known of every run but its events, oldest first."""
    return tuple(map(_stored_run, database.read(LIST)))


def _read_comparison(database: Database, comparison_id: str) -> Comparison:
    """Return a comparison without its runs."""
    return _comparison(database.read(COMPARISON, (comparison_id,))[0])


def _read_run(database: Database, stored: StoredRun, *, keeps_events: bool = False) -> RunSnapshot:
    """Return a run; the events of a long one are read once more when they are asked for."""
    run = Run(
        run_id=stored.run_id,
        name=stored.name,
        comparison=stored.comparison,
        spec=stored.spec,
        created=stored.created,
        num_ranks=stored.num_ranks,
        load=None if keeps_events else partial(_read_run, database, stored, keeps_events=True),
    )
    for row in database.read(BATCHES, (stored.run_id,)):
        is_first = row[2] == 0
        run.add(rows.batch_of(row, stored.header if is_first else None))
    for (text,) in database.read(REPORTS, (stored.run_id,)):
        run.add_report(rows.from_text(RunReport, text))
    run.end(stored.status, stored.detail)
    return run.snapshot()


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
        spec=rows.from_text(RunSpec, spec) if spec else None,
        header=rows.from_text(RunHeader, header) if header else None,
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
        specs=rows.specs_from_text(specs),
        environment=versions,
    )


def this_process() -> str:
    """Return host, process id and start time of this process, as the store keeps them."""
    pid, began = process_id()
    return f"{platform.node()} {pid} {began:.2f}"


def _is_written(writer: str) -> bool:
    """Return whether the kernel that wrote a run still runs; on another host nobody knows: yes."""
    host, pid, began = writer.rsplit(" ", 2)
    return host != platform.node() or is_alive((int(pid), float(began)))
