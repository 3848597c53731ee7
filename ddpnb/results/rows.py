"""The rows of measured steps, one row for each step of each worker.  Runs in the kernel."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.messages import EventBatch, Parts, RunReport

Floats = NDArray[np.float64]

Records = NDArray[Any]
"""A structured array with one row per event and one named field per column."""

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
"""The fields of one step of one worker, in the format of ``messages.pack_step``.

The format is little-endian, so that every machine can read a stored run.  The parts of the step,
``data`` to ``hidden``, are in seconds.
"""

METRIC = "metric "
"""The prefix of the fields that contain numbers logged by the user."""


def rows_of(batch: EventBatch) -> Records:
    """Return one row for each step of a batch, with the numbers that the user logged."""
    rows = np.frombuffer(batch.rows, dtype=EVENT)
    if batch.metrics:
        rows = with_metrics(rows, dict.fromkeys(name for _, name, _ in batch.metrics))
        for index, name, value in batch.metrics:
            rows[METRIC + name][index] = value
    return rows


def metrics_of(rows: Records) -> dict[str, str]:
    """Return a dict that maps the user's name of each logged number to its field."""
    fields = (rows.dtype.names or ())[len(EVENT.names or ()) :]
    return {field.removeprefix(METRIC): field for field in fields}


def with_metrics(rows: Records, names: Iterable[str]) -> Records:
    """Return a copy of rows with exactly these logged numbers; missing numbers are NaN."""
    made = np.empty(len(rows), dtype=[*EVENT.descr, *((METRIC + name, "<f8") for name in names)])
    for name in made.dtype.names or ():
        made[name] = rows[name] if name in (rows.dtype.names or ()) else np.nan
    return made


def stacked(parts: Sequence[Records]) -> Records:
    """Return the rows of all parts in order, with the logged numbers of all parts."""
    if len(parts) == 1:
        return parts[0]
    if names := dict.fromkeys(name for part in parts for name in metrics_of(part)):
        parts = [with_metrics(part, names) for part in parts]
    return np.concatenate(parts) if parts else np.empty(0, dtype=EVENT)


def with_ends(rows: Records, reports: Sequence[RunReport]) -> Records:
    """Return a copy in which each rank's last step ends at the time that the rank reported."""
    rows = rows.copy()
    for report in reports:
        own = np.flatnonzero(rows["rank"] == report.rank)
        if len(own) and report.seconds > rows["seconds"][own].max():  # False for a NaN report
            rows["seconds"][own[np.argmax(rows["seconds"][own])]] = report.seconds
    return rows
