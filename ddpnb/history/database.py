"""The SQLite file of the runs.  (Kernel.)

With a rollback journal: it works on NFS homes, survives a kill at any moment, and lets two
notebooks write in turns.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from ddpnb.protocol.errors import UserError

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
        self._connection: sqlite3.Connection | None = None
        with self._store_errors("opened"):
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, parents=True)
            self._connection = sqlite3.connect(
                path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._prepare()

    def read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of ``query``."""
        with self._lock, self._store_errors("read"):
            return self._open().execute(query, values).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Return a context with a connection; its changes are committed together or not at all."""
        with self._lock, self._store_errors("written"):
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"The runs in {self._path} are closed.")
        return self._connection

    def _prepare(self) -> None:
        connection = self._open()
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        if self._format() == 0:
            with self.write():
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
        return int(self._open().execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _store_errors(self, verb: str) -> Iterator[None]:
        """Raise errors of SQLite and of the system as a ``StoreError``."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"The runs in {self._path} cannot be {verb}: {error}.") from error
