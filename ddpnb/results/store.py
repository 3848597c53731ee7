"""The store keeps runs on disk, for this kernel and for later kernels.  Runs in the kernel.

The store is one SQLite file.  With its rollback journal, the file can be on NFS, stays valid if a
kernel is killed, and lets two notebooks write in turns.  Steps are stored as the bytes of ``EVENT``
rows, other data as JSON.  The store never uses pickle, so that reading a run never runs code.
"""

import atexit
import contextlib
import dataclasses
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch, RunReport
from ddpnb.results import query
from ddpnb.results.comparison import Comparison, overlay
from ddpnb.results.decoding import DAMAGES, DamageError, decoded, encoded, from_fields, stored_batch
from ddpnb.results.folders import temporary_folder
from ddpnb.results.query import StoredRun
from ddpnb.results.rows import Records, rows_of, stacked
from ddpnb.results.run import Run, RunSnapshot, Status
from ddpnb.results.writer import Change, StoreError, Writer

FILE_NAME = "runs.sqlite3"

FORMAT = 2
"""Version of the tables.  Increase this number if older versions of ddpnb cannot read new files."""

BUSY_SECONDS = 5.0
"""Maximum seconds to wait until another notebook has finished writing."""

LAST_WRITE_SECONDS = 1.0
"""Maximum seconds that the end of a run, or of the kernel, waits for the disk."""

CAN_WAIT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Errors after which ddpnb keeps the runs in memory and tries again."""

TABLES = """
CREATE TABLE comparisons (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, created REAL NOT NULL,
    task TEXT NOT NULL, source TEXT NOT NULL, specs TEXT NOT NULL, environment TEXT NOT NULL
);
CREATE TABLE runs (
    id TEXT PRIMARY KEY, comparison TEXT NOT NULL REFERENCES comparisons ON DELETE CASCADE,
    name TEXT NOT NULL, repeat INTEGER NOT NULL, created REAL NOT NULL, writer TEXT NOT NULL,
    status TEXT NOT NULL, detail TEXT NOT NULL DEFAULT '', spec TEXT, header TEXT, heartbeat REAL
);
CREATE TABLE batches (
    run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, rank INTEGER NOT NULL,
    sequence INTEGER NOT NULL, num_events INTEGER NOT NULL, events BLOB NOT NULL,
    metrics TEXT NOT NULL, marks TEXT NOT NULL DEFAULT '', PRIMARY KEY (run, rank, sequence)
);
CREATE TABLE reports (
    run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, rank INTEGER NOT NULL,
    report TEXT NOT NULL, PRIMARY KEY (run, rank)
);
"""

INSERT_RUN = """
INSERT INTO runs (id, comparison, name, repeat, created, writer, status, spec)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""

RUNS = """
SELECT runs.rowid AS row, runs.id AS run_id, comparison AS comparison_id, task, repeat, writer,
    comparisons.name AS comparison, runs.name, runs.created, status, detail, spec, header, runs.*,
    (SELECT CAST(total(num_events) AS INTEGER) FROM batches WHERE run = runs.id) AS num_events,
    (SELECT count(DISTINCT rank) FROM batches WHERE run = runs.id AND rank >= 0) AS num_ranks
FROM runs LEFT JOIN comparisons ON comparisons.id = runs.comparison ORDER BY runs.rowid
"""

RUN_ID = re.compile("[0-9a-f]{12}")
"""The ids that ``recorder.new_id`` returns.  Only such an id becomes the name of a file."""

ELSEWHERE = "(the environment variable DDPNB_DATA sets another folder)"


@final
class Store:
    """The runs of one folder.

    A thread writes the runs.  Changes that could not be written stay in memory until a later write.
    A crash loses at most the last ``flush_seconds``.  The methods that read raise ``StoreError``.

    Args:
        folder: the folder of the file, such as ``runs_folder()``.  If the folder does not exist,
            it is created with access only for the owner.
        flush_seconds: number of seconds for which batches are collected before they are written.
    """

    def __init__(self, folder: Path, *, flush_seconds: float = 1.0) -> None:
        self.folder = folder
        self._path = folder / FILE_NAME
        self._lock = threading.RLock()  # of the connection
        self._writer = Writer(self._write_all, flush_seconds)
        self.trouble = ""
        """A sentence that says why runs are not saved; empty if they are saved."""
        self._is_moved = False
        atexit.register(self._at_exit, os.getpid())
        with self._store_errors("opened"):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, parents=True)
            self._connection = sqlite3.connect(
                self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            self._prepare()

    def begin_comparison(self, comparison: Comparison, *, wanted_name: str = "") -> Comparison:
        """Store a comparison before its training; return the comparison with its final name.

        Args:
            comparison: the comparison.  Its name gets a number if ``wanted_name`` is empty.
            wanted_name: the user's name.  An earlier comparison with this name gets a number.

        Raises:
            UserError: the user's name is not valid.
        """
        if wanted_name:
            query.check_name(wanted_name)
        texts = (comparison.task, comparison.source)
        facts = (*texts, encoded(comparison.specs), encoded(comparison.environment))
        made = [comparison]

        def insert(connection: sqlite3.Connection) -> None:
            taken = {each for (each,) in connection.execute("SELECT name FROM comparisons")}
            name = wanted_name or query.numbered(comparison.name, taken)
            if name in taken:
                earlier = (query.numbered(name, taken), name)
                connection.execute("UPDATE comparisons SET name = ? WHERE name = ?", earlier)
            row = (comparison.comparison_id, name, comparison.created, *facts)
            connection.execute("INSERT INTO comparisons VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            made.append(dataclasses.replace(comparison, name=name))

        self._writer.put(Change(write=insert))
        self._try_flush(BUSY_SECONDS)
        return made[-1]

    def begin_run(self, comparison_id: str, run: RunSnapshot) -> None:
        """Store a run before its training; the comparison must have begun."""
        state = (query.writer_of(), run.status, encoded(run.spec) if run.spec else None)
        row = (run.run_id, comparison_id, run.name, run.repeat, run.created, *state)
        self._writer.running.add(run.run_id)
        self._writer.put(Change(write=lambda connection: connection.execute(INSERT_RUN, row)))

    def append(self, batch: EventBatch) -> None:
        """Add a batch.  It is written within ``flush_seconds``."""
        header = encoded(batch.header) if batch.header else None
        facts = (encoded(batch.metrics), encoded([dataclasses.astuple(m) for m in batch.marks]))
        row = (batch.run_id, batch.rank, batch.sequence, batch.num_steps, batch.rows, *facts)

        def insert(connection: sqlite3.Connection) -> None:
            wanted = "UPDATE runs SET header = ifnull(?, header) WHERE id = ?"
            connection.execute(wanted, (header, batch.run_id))
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        self._writer.put(Change(run_id=batch.run_id, batch=batch, write=insert))

    def add_report(self, report: RunReport) -> None:
        """Store the report of a rank."""
        row = (report.run_id, report.rank, encoded(report))
        wanted = "INSERT OR REPLACE INTO reports VALUES (?, ?, ?)"
        self._writer.put(Change(write=lambda connection: connection.execute(wanted, row)))

    def finish(self, run_id: str, status: Status, detail: str = "") -> None:
        """Store a run's final status and all pending batches, if the disk answers in time."""
        wanted = "UPDATE runs SET status = ?, detail = ? WHERE id = ?"
        row = (status, decoded(detail, str), run_id)
        self._writer.running.discard(run_id)
        end = Change(run_id=run_id, is_end=True, write=lambda each: each.execute(wanted, row))
        self._writer.put(end)
        self._try_flush()

    def flush(self) -> None:
        """Write all pending changes now; raise StoreError if this fails."""
        self._writer.flush(BUSY_SECONDS)

    def list(self) -> tuple[StoredRun, ...]:
        """Return all runs without their steps, in the order in which they began."""
        with self._snapshot() as connection:
            return tuple(map(query.stored_run, connection.execute(RUNS).fetchall()))

    def load(self, *addresses: str) -> Comparison:
        """Return one comparison that contains the runs listed in ``addresses``.

        Args:
            addresses: names as in ``query.resolve``, such as ``"digits-1/ddp"``, ``"mine"``.

        Raises:
            UserError: no run has such a name; the message suggests the closest names.
        """
        self._try_flush()
        with self._snapshot():
            known, parts = self.list(), []
            for found in (query.resolve(address, known) for address in addresses):
                for comparison_id in dict.fromkeys(run.comparison_id for run in found):
                    own = [run for run in found if run.comparison_id == comparison_id]
                    runs = [self._read_run(run) for run in own]
                    parts.append(self._comparison(own[0]).with_runs(runs))
        return overlay(parts)

    def steps(self, run_id: str) -> Records:
        """Return one row per step of a run in order of arrival, also of steps not yet written."""
        with self._snapshot() as connection:
            wanted = "SELECT * FROM batches WHERE run = ? ORDER BY rowid"
            found = {}
            for row in connection.execute(wanted, (run_id,)):
                with contextlib.suppress(*DAMAGES):
                    found[row["rank"], row["sequence"]] = stored_batch(row, run_id)
            for change in tuple(self._writer.queue):
                if change.run_id == run_id and (batch := change.batch):
                    found[batch.rank, batch.sequence] = batch
        return stacked([rows_of(batch) for batch in found.values()])

    def delete(self, address: str) -> tuple[str, ...]:
        """Delete the runs that ``address`` names, with their weights; return their addresses.

        Raises:
            UserError: one of the runs is being trained.
        """
        with self._write() as connection:
            found = query.resolve(address, self.list())
            if busy := [run.address for run in found if run.status is Status.RUNNING]:
                raise UserError(f"{', '.join(busy)} is being trained. Stop it with %ddp_interrupt.")
            connection.executemany("DELETE FROM runs WHERE rowid = ?", [(r.row,) for r in found])
            connection.executemany(
                "DELETE FROM comparisons WHERE id = ?"
                " AND NOT EXISTS (SELECT 1 FROM runs WHERE comparison = comparisons.id)",
                [(run.comparison_id,) for run in found],
            )
        with self._store_errors("deleted"):
            for run in found:
                if RUN_ID.fullmatch(run.run_id):
                    (self.models / f"{run.run_id}.pt").unlink(missing_ok=True)
        return tuple(run.address for run in found)

    def move(self, folder: Path) -> None:
        """Continue in another folder, with copies of all runs that can still be read."""
        new = Store(folder)
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.backup(new._connection)
            self._connection.close()
            self.folder, self._path, self._connection = folder, new._path, new._connection

    @property
    def models(self) -> Path:
        """The folder for the trained weights of runs that save their weights."""
        return self.folder / "models"

    def close(self) -> None:
        """Write all pending changes and close the file; may be called twice."""
        self._try_flush()
        self._writer.running.clear()
        self._writer.queue.clear()
        atexit.unregister(self._at_exit)
        with self._lock:
            self._connection.close()

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # not in a process forked from the kernel
            self._try_flush()

    def _try_flush(self, seconds: float = LAST_WRITE_SECONDS) -> None:
        with contextlib.suppress(StoreError):
            self._writer.flush(seconds)

    def _write_all(self, changes: Sequence[Change]) -> None:
        """Write changes and the time of each run in progress, all or none."""
        try:
            with self._write() as connection:
                for change in changes:
                    with contextlib.suppress(sqlite3.IntegrityError):  # the run has been deleted
                        change.write(connection)
                columns = {row["name"] for row in connection.execute("PRAGMA table_info(runs)")}
                if "heartbeat" not in columns:  # the file of an earlier version
                    connection.execute("ALTER TABLE runs ADD COLUMN heartbeat REAL")
                beats = [(time.time(), run_id) for run_id in tuple(self._writer.running)]
                connection.executemany("UPDATE runs SET heartbeat = ? WHERE id = ?", beats)
        except StoreError as error:
            code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
            why = "the disk is full" if code == sqlite3.SQLITE_FULL else str(error.__cause__)
            keeps = f"The runs cannot be saved: {why}. ddpnb keeps them"
            if not self._is_moved and not (code in CAN_WAIT and self._path.exists()):
                self._is_moved = True
                self.move(temporary_folder())
                self.trouble = f"{keeps} in {self.folder} until the kernel ends {ELSEWHERE}."
                return self._write_all(changes)
            if not self._is_moved:
                self.trouble = f"{keeps} in memory and tries again."
            if code != sqlite3.SQLITE_BUSY:
                self._write_ends(changes, why)
            raise
        if not self._is_moved:
            self.trouble = ""

    def _write_ends(self, changes: Sequence[Change], why: str) -> None:
        """Write only the final status of runs, and how many of their steps are missing."""
        lost = Counter[str]()
        with contextlib.suppress(StoreError), self._write() as connection:
            for change in changes:
                lost[change.run_id] += change.num_steps
                if change.is_end:
                    change.write(connection)
                    num_lost = lost[change.run_id]
                    note = f"steps not stored: {num_lost:,} ({why})" if num_lost else ""
                    wanted = "UPDATE runs SET detail = trim(detail || '; ' || ?, '; ') WHERE id = ?"
                    connection.execute(wanted, (note, change.run_id))

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._format() == 0:
            with self._write() as connection:
                if self._format() == 0:  # another notebook may have created the tables
                    for statement in TABLES.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {FORMAT}")
        if (found := self._format()) != FORMAT:
            self.close()
            raise StoreError(
                f"The runs in {self._path} were written by another version of ddpnb (format {found}"
                f"; this version reads format {FORMAT}). Use that version, or move the file away."
            )

    def _format(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """Return a context manager for writing.  If an error is raised, no change is committed."""
        with self._lock, self._store_errors("written"):
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits or rolls back
                yield self._connection

    @contextmanager
    def _store_errors(self, verb: str) -> Iterator[None]:
        """Convert errors of SQLite and of the system to ``StoreError``."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError) as error:
            why = f"{error} {ELSEWHERE}"
            raise StoreError(f"The runs in {self._path} cannot be {verb}: {why}.") from error

    @contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        """Return a context manager in which all reads see the file at the same time."""
        with self._lock, self._store_errors("read"):
            self._connection.execute("SAVEPOINT reading")
            try:
                yield self._connection
            finally:
                self._connection.execute("RELEASE reading")

    def _comparison(self, stored: StoredRun) -> Comparison:
        """Return the comparison of a stored run, without runs."""
        wanted = "SELECT * FROM comparisons WHERE id = ?"
        row = self._connection.execute(wanted, (stored.comparison_id,)).fetchone()
        known: dict[str, Any] = {"comparison_id": stored.comparison_id, "name": stored.comparison}
        try:
            return from_fields(Comparison, {**(row or {}), **known})
        except DamageError as error:
            return Comparison(**known, environment={"unreadable": str(error)})

    def _read_run(self, stored: StoredRun) -> RunSnapshot:
        """Return a stored run with its steps, except damaged steps."""
        run = Run(
            run_id=stored.run_id,
            name=stored.name,
            comparison=stored.comparison,
            spec=stored.spec,
            created=stored.created,
            read_steps=partial(self.steps, stored.run_id),
        )
        details = [stored.detail] if stored.detail else []
        for table in ("batches", "reports"):
            wanted = f"SELECT * FROM {table} WHERE run = ? ORDER BY rowid"
            for row in self._connection.execute(wanted, (stored.run_id,)):
                try:
                    if table == "reports":
                        run.add_report(decoded(row["report"], RunReport))
                    else:
                        run.add(stored_batch(row, stored.run_id, stored.header))
                except DAMAGES:
                    details.append(f"a row of its {table} is damaged")
        run.end(stored.status, "; ".join(dict.fromkeys(details)))
        return run.snapshot()
