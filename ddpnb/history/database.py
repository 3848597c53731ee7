"""The SQLite file of the runs, and what its rows hold.  (Kernel.)

With a rollback journal: it works on NFS homes, survives a kill at any moment, and lets two
notebooks write in turns.  Events are stored as the bytes of ``EVENT`` rows, the rest as JSON.
Never pickle: a stored run from a stranger must not be able to run code.
"""

import dataclasses
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import EventBatch, Mark, MarkKind, Parts, RunHeader, RunReport, RunSpec

Floats = NDArray[np.float64]

Records = NDArray[Any]
"""A structured array: one row per event, one named field per column."""

EVENT = np.dtype(
    [
        ("seconds", "<f8"),
        ("loss", "<f8"),
        ("num_samples", "<i8"),
        ("step", "<i4"),
        ("version", "<i4"),
        ("staleness", "<i4"),
        ("rank", "<i4"),
        ("num_bytes_sent", "<i8"),
        *((part, "<f4") for part in Parts._fields),
    ]
)
"""One step of one worker, as ``messages.pack_step`` packs it.

Little-endian, so that a stored run can be read anywhere.  The parts of the step, ``data``
to ``hidden``, are in seconds.
"""

METRIC = "metric "
"""Begins the name of a further field of a row: a number that the user logged with the step."""

FORMAT = 2
"""Version of the tables below; a change that earlier versions cannot read raises it."""

WAIT_SECONDS = 5.0
"""How long to wait while another notebook writes."""

TABLES = """
CREATE TABLE comparisons (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, created REAL NOT NULL,
    task TEXT NOT NULL, source TEXT NOT NULL, specs TEXT NOT NULL, environment TEXT NOT NULL
);
CREATE TABLE runs (
    id TEXT PRIMARY KEY, comparison TEXT NOT NULL REFERENCES comparisons ON DELETE CASCADE,
    name TEXT NOT NULL, repeat INTEGER NOT NULL, created REAL NOT NULL, writer TEXT NOT NULL,
    status TEXT NOT NULL, detail TEXT NOT NULL DEFAULT '', spec TEXT, header TEXT
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


class StoreError(UserError):
    """Runs could not be read or written; a training goes on."""


@final
class Database:
    """The open file, for one thread at a time.

    Args:
        path: the file; it and its folder (for the owner alone) are made if absent.

    Raises:
        StoreError: it cannot be opened, or another version of ddpnb wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._store_errors("opened"):
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, parents=True)
            self._connection = sqlite3.connect(
                path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._prepare()

    def read(self, query: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """Return all rows of ``query``."""
        with self._lock, self._store_errors("read"):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Return a context with a connection; its changes are committed together or not at all."""
        with self._lock, self._store_errors("written"):
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back
                yield self._connection

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            self._connection.close()

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._format() == 0:
            with self.write() as connection:
                if self._format() == 0:  # another notebook may have been first
                    for statement in TABLES.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {FORMAT}")
        if (found := self._format()) != FORMAT:
            self.close()
            age, advice = ("newer", "update ddpnb, or") if found > FORMAT else ("older", "please")
            raise StoreError(
                f"The runs in {self._path} were written by a {age} ddpnb "
                f"(format {found}, this one reads {FORMAT}): {advice} move the file away."
            )

    def _format(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _store_errors(self, verb: str) -> Iterator[None]:
        """Raise errors of SQLite and of the system as a ``StoreError``."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"The runs in {self._path} cannot be {verb}: {error}.") from error


def rows_of(batch: EventBatch) -> Records:
    """Return the rows of a batch: one for each step, with the numbers that were logged with it."""
    rows = np.frombuffer(batch.rows, dtype=EVENT)
    if batch.metrics:
        rows = with_metrics(rows, dict.fromkeys(name for _, name, _ in batch.metrics))
        for index, name, value in batch.metrics:
            rows[METRIC + name][index] = value
    return rows


def metrics_of(rows: Records) -> dict[str, str]:
    """Return the user's names of the further numbers in some rows, each with its field."""
    fields = (rows.dtype.names or ())[len(EVENT.names or ()) :]
    return {field.removeprefix(METRIC): field for field in fields}


def with_metrics(rows: Records, names: Iterable[str]) -> Records:
    """Return a copy of rows that has these further numbers alone, NaN where they were unknown."""
    made = np.empty(len(rows), dtype=[*EVENT.descr, *((METRIC + name, "<f8") for name in names)])
    for name in made.dtype.names or ():
        made[name] = rows[name] if name in (rows.dtype.names or ()) else np.nan
    return made


def stacked(parts: Sequence[Records]) -> Records:
    """Return rows one after the other, with the further numbers of all parts."""
    if len(parts) == 1:
        return parts[0]
    if names := dict.fromkeys(name for part in parts for name in metrics_of(part)):
        parts = [with_metrics(part, names) for part in parts]
    return np.concatenate(parts) if parts else np.empty(0, dtype=EVENT)


Message = TypeVar("Message", RunSpec, RunHeader, RunReport)


def to_text(value: RunSpec | RunHeader | RunReport) -> str:
    """Return ``value`` as JSON, with NaN and infinity."""
    return json.dumps(dataclasses.asdict(value))


def from_text(kind: type[Message], text: str) -> Message:
    """Return the message that ``to_text`` wrote."""
    return from_fields(kind, json.loads(text))


def from_fields(kind: type[Message], given: Mapping[str, Any]) -> Message:
    """Return a message with the given fields; unknown ones are dropped.

    What was trained once stays readable: a spec of a strategy, task or option that is no longer
    in the catalogue is returned as it was written.
    """
    fields = dataclasses.fields(kind)
    values: dict[str, Any] = {
        entry.name: tuple(value) if isinstance(value := given[entry.name], list) else value
        for entry in fields
        if entry.name in given
    }
    try:
        return kind(**values)
    except UserError:
        made = object.__new__(kind)  # unlike kind(...), this checks nothing
        for entry in fields:
            object.__setattr__(made, entry.name, values.get(entry.name, entry.default))
        return made


def batch_row(batch: EventBatch) -> tuple[Any, ...]:
    """Return a row of the table ``batches``."""
    metrics = json.dumps(batch.metrics) if batch.metrics else ""
    marks = json.dumps([dataclasses.astuple(mark) for mark in batch.marks]) if batch.marks else ""
    num_events, events = batch.num_steps, batch.rows
    return (batch.run_id, batch.rank, batch.sequence, num_events, events, metrics, marks)


def batch_of(row: Sequence[Any], header: RunHeader | None) -> EventBatch:
    """Return the batch that ``batch_row`` wrote, with ``header``."""
    run_id, rank, sequence, _, events, metrics, marks = row
    return EventBatch(
        run_id=run_id,
        rank=rank,
        sequence=sequence,
        header=header,
        rows=events,
        metrics=tuple((index, name, value) for index, name, value in json.loads(metrics or "[]")),
        marks=tuple(
            Mark(rank=rank, seconds=seconds, text=text, kind=MarkKind(kind))
            for rank, seconds, text, kind in json.loads(marks or "[]")
        ),
    )
