"""The store: runs on disk, for this kernel and later ones.  (Kernel.)

``Recorder`` begins a comparison and its runs, appends batches as they arrive, and finishes each
run; a crash loses at most the last ``flush_seconds``.
"""

import json
import platform
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import final

from ddpnb.history import query
from ddpnb.history.comparison import Comparison, overlay
from ddpnb.history.database import (
    Database,
    Records,
    batch_of,
    batch_row,
    from_fields,
    from_text,
    rows_of,
    stacked,
    to_text,
)
from ddpnb.history.model import Run, RunSnapshot, Status
from ddpnb.history.query import StoredRun
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch, RunHeader, RunReport, RunSpec
from ddpnb.protocol.processes import is_alive, process_id, working_folder

FILE_NAME = "runs.sqlite3"

MAX_PENDING_BATCHES = 20_000
"""Batches kept in memory while the disk refuses them; later ones are lost, and counted so."""

INSERT_BATCH = """
INSERT OR IGNORE INTO batches SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?, ?))
WHERE column1 IN (SELECT id FROM runs)
"""
"""Inserts nothing for a run that another notebook has deleted meanwhile."""

LIST = """
SELECT runs.id AS run_id, comparisons.id AS comparison_id, comparisons.name AS comparison,
    runs.name, runs.repeat, runs.created, comparisons.task, runs.status, runs.detail, runs.writer,
    runs.spec, runs.header,
    (SELECT coalesce(sum(num_events), 0) FROM batches WHERE run = runs.id) AS num_events,
    (SELECT count(DISTINCT rank) FROM batches WHERE run = runs.id AND rank >= 0) AS num_ranks
FROM runs JOIN comparisons ON comparisons.id = runs.comparison
ORDER BY runs.created, runs.rowid
"""
"""The fields of ``StoredRun``, and the writer of each run."""

COMPARISON = """
SELECT id AS comparison_id, name, created, task, source, specs, environment
FROM comparisons WHERE id = ?
"""

BATCHES = """
SELECT run, rank, sequence, num_events, events, metrics, marks
FROM batches WHERE run = ? ORDER BY rowid
"""

REPORTS = "SELECT report FROM reports WHERE run = ? ORDER BY rank"


@final
class Store:
    """The runs of one folder.

    Every method raises ``StoreError`` if the disk refuses.  Batches that could not be written
    are tried again at the next call.

    Args:
        folder: of the file; ``runs_folder()`` returns the project's.
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
        """Store a comparison that is about to train; its runs follow by ``begin_run``.

        Args:
            comparison: its ``name``, e.g. the task, gets a number if ``wanted_name`` is empty.
            wanted_name: the user's name for it.

        Returns:
            The same comparison with its final name.
        """
        with self._database.write() as connection:
            name = query.free_name(wanted_name, comparison.name, _names(connection))
            connection.execute(
                "INSERT INTO comparisons VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    comparison.comparison_id,
                    name,
                    comparison.created,
                    comparison.task,
                    comparison.source,
                    json.dumps([asdict(spec) for spec in comparison.specs]),
                    json.dumps(dict(comparison.environment)),
                ),
            )
        return replace(comparison, name=name)

    def begin_run(self, comparison_id: str, run: RunSnapshot) -> None:
        """Store a run that is about to train, of a comparison that has begun."""
        spec = to_text(run.spec) if run.spec else None
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
                    _this_process(),
                    run.status,
                    spec,
                ),
            )

    def append(self, batch: EventBatch) -> None:
        """Store a batch; it is written within ``flush_seconds``, at the next call."""
        with self._lock:
            if len(self._pending) < MAX_PENDING_BATCHES:
                self._pending.append(batch)
        if time.monotonic() - self._last_flush >= self._flush_seconds:
            self.flush()

    def add_report(self, report: RunReport) -> None:
        """Store the report of a rank."""
        row = (report.run_id, report.rank, to_text(report))
        with self._database.write() as connection:
            connection.execute("INSERT OR REPLACE INTO reports VALUES (?, ?, ?)", row)

    def finish(self, run_id: str, status: Status, detail: str = "") -> None:
        """Store how a run ended, and all pending batches."""
        self.flush()
        with self._database.write() as connection:
            connection.execute(
                "UPDATE runs SET status = ?, detail = ? WHERE id = ?",
                (Status(status), detail, run_id),
            )

    def flush(self) -> None:
        """Write all pending batches, or none if the disk refuses."""
        with self._lock:
            try:
                if self._pending:
                    self._write(self._pending)
                self._pending.clear()
            finally:  # after a failure too, so that a slow disk gets a pause
                self._last_flush = time.monotonic()

    def list(self) -> tuple[StoredRun, ...]:
        """Return every run without its events, oldest first."""
        return tuple(map(_stored_run, self._database.read(LIST)))

    def load(self, *addresses: str) -> Comparison:
        """Return the runs that some addresses name, as one comparison.

        Args:
            addresses: as ``query.resolve`` takes them, e.g. ``"digits-1/ddp"``, ``"mine"``.

        Raises:
            UserError: nothing has such a name; the message suggests the closest ones.
        """
        self.flush()
        known = self.list()
        return overlay([self._load(query.resolve(address, known)) for address in addresses])

    def steps(self, run_id: str) -> Records:
        """Return one row for each step of a run, in order of arrival."""
        self.flush()
        rows = self._database.read(BATCHES, (run_id,))
        return stacked([rows_of(batch_of(row, None)) for row in rows])

    def rename(self, name: str, new_name: str) -> str:
        """Rename the comparison of the runs that ``name`` names; return the new name."""
        found = query.resolve(name, self.list())[-1]
        with self._database.write() as connection:
            taken = _names(connection) - {found.comparison}
            free = query.free_name(new_name, new_name, taken)
            connection.execute(
                "UPDATE comparisons SET name = ? WHERE id = ?", (free, found.comparison_id)
            )
        return free

    def delete(self, address: str) -> tuple[str, ...]:
        """Delete the runs that ``address`` names, and their weights; return their addresses.

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
            (self.models / f"{run.run_id}.pt").unlink(missing_ok=True)
        return tuple(run.address for run in found)

    @property
    def models(self) -> Path:
        """The folder for the trained weights of each run that saves them."""
        return self.folder / "models"

    def close(self) -> None:
        """Write all pending batches and close; may be called twice."""
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
            (row,) = self._database.read(COMPARISON, (comparison_id,))
            parts.append(_comparison(row).with_runs([self._read_run(run) for run in own]))
        return overlay(parts)

    def _read_run(self, stored: StoredRun) -> RunSnapshot:
        """Return a run; the steps of a long one are read again when they are needed."""
        run = Run(
            run_id=stored.run_id,
            name=stored.name,
            comparison=stored.comparison,
            spec=stored.spec,
            created=stored.created,
            load=partial(self.steps, stored.run_id),
        )
        for row in self._database.read(BATCHES, (stored.run_id,)):
            run.add(batch_of(row, stored.header if row["sequence"] == 0 else None))
        for (text,) in self._database.read(REPORTS, (stored.run_id,)):
            run.add_report(from_text(RunReport, text))
        run.end(stored.status, stored.detail)
        return run.snapshot()

    def _write(self, batches: Sequence[EventBatch]) -> None:
        headers = [(to_text(b.header), b.run_id) for b in batches if b.header is not None]
        with self._database.write() as connection:
            connection.executemany("UPDATE runs SET header = ? WHERE id = ?", headers)
            connection.executemany(INSERT_BATCH, map(batch_row, batches))


def runs_folder(start: Path | None = None) -> Path:
    """Return the folder for stored runs; it need not exist.

    It is ``data/runs`` in the project around ``start``: the nearest folder upwards that has
    ``data/`` beside ``pyproject.toml`` or ``notebooks/``.  Outside a project it is ``data/runs``
    in ``start`` itself.

    Args:
        start: where to look from; the working directory if not given.
    """
    here = (start or working_folder()).resolve()
    project = next((folder for folder in (here, *here.parents) if _is_project(folder)), here)
    return project / "data" / "runs"


def _names(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM comparisons")}


def _is_project(folder: Path) -> bool:
    is_marked = (folder / "pyproject.toml").is_file() or (folder / "notebooks").is_dir()
    return is_marked and (folder / "data").is_dir()


def _stored_run(row: sqlite3.Row) -> StoredRun:
    fields = dict(row)
    writer, spec, header = (fields.pop(name) for name in ("writer", "spec", "header"))
    status = Status(fields.pop("status"))
    if status is Status.RUNNING and not _is_written(writer):
        status = Status.STOPPED
        fields["detail"] = "its kernel ended; kept up to the last flush"
    return StoredRun(
        **fields,
        status=status,
        spec=from_text(RunSpec, spec) if spec else None,
        header=from_text(RunHeader, header) if header else None,
    )


def _comparison(row: sqlite3.Row) -> Comparison:
    """Return a comparison without its runs."""
    fields = dict(row)
    specs = tuple(from_fields(RunSpec, given) for given in json.loads(fields.pop("specs")))
    versions = json.loads(fields.pop("environment"))
    return Comparison(**fields, specs=specs, environment=versions)


def _this_process() -> str:
    """Return host, process id and start time of this process, as a run's writer."""
    pid, began = process_id()
    return f"{platform.node()} {pid} {began:.2f}"


def _is_written(writer: str) -> bool:
    """Return whether the kernel that wrote a run is alive; on another host, assume so."""
    host, pid, began = writer.rsplit(" ", 2)
    return host != platform.node() or is_alive((int(pid), float(began)))
