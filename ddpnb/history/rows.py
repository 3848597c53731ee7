"""Specs, headers, reports and events as text and bytes, and back.  (Kernel.)

JSON for the few, the bytes of ``EVENT`` rows for the many.  Never pickle: a stored run from a
stranger must not be able to run code.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

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
        ("step", "<i8"),
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

METRIC = np.dtype([("event", "<i8"), ("value", "<f8")])
"""A number that the user logged, and the index of its event."""


def rows_of(batch: EventBatch) -> Records:
    """Return the rows of a batch, read-only and without a copy."""
    return np.frombuffer(batch.rows, dtype=EVENT)


Message = TypeVar("Message", RunSpec, RunHeader, RunReport)


def to_text(value: RunSpec | RunHeader | RunReport) -> str:
    """Return ``value`` as JSON, with NaN and infinity."""
    return json.dumps(dataclasses.asdict(value))


def from_text(kind: type[Message], text: str) -> Message:
    """Return the message that ``to_text`` wrote; unknown fields are dropped.

    What was trained once stays readable: a spec of a strategy, task or option that is no longer
    in the catalogue is returned as it was written.
    """
    known = {entry.name for entry in dataclasses.fields(kind)}
    given: Mapping[str, Any] = json.loads(text)
    values = {name: _as_tuple(value) for name, value in given.items() if name in known}
    if kind is RunHeader and "is_emulated" not in given:  # stored before there was this field
        values["is_emulated"] = any("emulated" in note for note in given["notes"])
    try:
        return kind(**values)
    except UserError:
        return _unchecked(kind, values)


def specs_to_text(specs: tuple[RunSpec, ...]) -> str:
    """Return several specs as one JSON list."""
    return json.dumps([dataclasses.asdict(spec) for spec in specs])


def specs_from_text(text: str) -> tuple[RunSpec, ...]:
    """Return the specs that ``specs_to_text`` wrote."""
    return tuple(from_text(RunSpec, json.dumps(given)) for given in json.loads(text))


def batch_row(batch: EventBatch) -> tuple[str, int, int, int, bytes, str, str]:
    """Return run id, rank, sequence, number of events, their bytes, metrics and marks as JSON."""
    metrics = json.dumps(batch.metrics) if batch.metrics else ""
    marks = json.dumps([dataclasses.astuple(mark) for mark in batch.marks]) if batch.marks else ""
    return (
        batch.run_id,
        batch.rank,
        batch.sequence,
        batch.num_steps,
        batch.rows,
        metrics,
        marks,
    )


def batch_of(
    row: tuple[str, int, int, int, bytes, str, str], header: RunHeader | None
) -> EventBatch:
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
            Mark(rank=rank, seconds=seconds, text=text, kind=_kind_of(text, *kind))
            for rank, seconds, text, *kind in json.loads(marks or "[]")
        ),
    )


def _kind_of(text: str, kind: str | None = None) -> MarkKind:
    """Return the kind of a mark; if it was stored before marks had kinds, its text says it."""
    if kind is None:
        kind = text if text in set(MarkKind) else MarkKind.OTHER
    return MarkKind(kind)


def _unchecked(kind: type[Message], values: Mapping[str, Any]) -> Message:
    """Return a ``kind`` that its ``__post_init__`` has not checked."""
    made = object.__new__(kind)
    for entry in dataclasses.fields(kind):
        object.__setattr__(made, entry.name, values.get(entry.name, entry.default))
    return made


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
