"""In what form are a million events held and stored?  (Notebook side.)

One numpy structured array: 76 bytes an event, appended to in place, read as a
view.  The same bytes go into the store, so nothing is ever pickled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpnb.wire import EventBatch, Mark, Parts, RunHeader, StepEvent

Records = NDArray[Any]
"""A structured array: one row per event, one named field per column."""

NO_STALENESS = -1
"""Stands for "this step has no staleness" in the ``staleness`` column."""

_FIRST_FIELDS = [
    ("seconds", "<f8"),
    ("loss", "<f8"),
    ("num_samples", "<i8"),
    ("step", "<i8"),
    ("staleness", "<i4"),
    ("rank", "<i4"),
]

FIRST_EVENT = np.dtype(_FIRST_FIELDS)
"""What a row was in the first format of the store."""

EVENT = np.dtype(
    [*_FIRST_FIELDS, ("num_bytes_sent", "<i8"), *((part, "<f4") for part in Parts._fields)]
)
"""One step of one worker; little-endian, so that a stored run can be read anywhere.

The parts of the step, ``data`` to ``hidden``, are seconds.
"""

METRIC = np.dtype([("event", "<i8"), ("value", "<f8")])
"""One number of the user's own, and the index of the event that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """An ``EventBatch`` whose steps have become rows of ``EVENT``."""

    run_id: str
    rank: int
    sequence: int
    header: RunHeader | None
    events: Records
    metrics: tuple[tuple[int, str, float], ...] = ()
    """Index within this batch, name, value."""
    marks: tuple[Mark, ...] = ()


def pack(batch: EventBatch) -> PackedBatch:
    """Return ``batch`` with its steps as rows of ``EVENT``."""
    return PackedBatch(
        run_id=batch.run_id,
        rank=batch.rank,
        sequence=batch.sequence,
        header=batch.header,
        events=pack_steps(batch.rank, batch.steps),
        metrics=tuple(
            (index, name, value)
            for index, step in enumerate(batch.steps)
            for name, value in step.metrics
        ),
        marks=batch.marks,
    )


def pack_steps(rank: int, steps: Sequence[StepEvent]) -> Records:
    """Return one row of ``EVENT`` per step."""
    rows = [
        (
            step.seconds,
            step.loss,
            step.num_samples,
            step.step,
            NO_STALENESS if step.staleness is None else step.staleness,
            rank,
            step.num_bytes_sent,
            *step.parts,
        )
        for step in steps
    ]
    return np.array(rows, dtype=EVENT)


def unpack_rows(data: bytes, num_events: int) -> Records:
    """Return the rows that were stored as bytes, in this format or the first."""
    if num_events and len(data) == num_events * FIRST_EVENT.itemsize:
        rows = np.zeros(num_events, dtype=EVENT)
        rows[list(FIRST_EVENT.names or ())] = np.frombuffer(data, dtype=FIRST_EVENT)
        return rows
    return np.frombuffer(data, dtype=EVENT)


@final
class Rows:
    """Rows that are only ever appended: ``view`` costs nothing and never changes.

    A view stays what it was because rows already written are never touched
    again, and growing copies them into a new buffer.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._buffer: Records = np.empty(256, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, rows: Records) -> None:
        """Append ``rows``; amortised constant time per row."""
        end = self._length + len(rows)
        if end > len(self._buffer):
            grown: Records = np.empty(max(end, 2 * len(self._buffer)), dtype=self._buffer.dtype)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = rows
        self._length = end

    def view(self) -> Records:
        """Return the rows so far, read-only; safe while another thread appends."""
        length = self._length  # before the buffer: a newer buffer holds all of the older rows
        rows = self._buffer[:length]
        rows.flags.writeable = False
        return rows
