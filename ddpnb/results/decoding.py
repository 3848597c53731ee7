"""Reads values from a store that may be damaged or from a stranger.  Runs in the kernel."""

import dataclasses
import json
import re
import sqlite3
import time
import typing
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

import numpy as np

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import NO_STALENESS, EventBatch, RunHeader
from ddpnb.results.rows import EVENT

MAX_VALUE_BYTES = 16_000_000
"""Maximum size of a stored value.  A larger value counts as damaged."""

MAX_NAME = 1000
"""Maximum number of characters in the name of a run or comparison."""

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that may move a terminal's cursor, change its colours or reorder the text."""

DAMAGES = (
    *(ValueError, TypeError, LookupError, ArithmeticError),
    *(AttributeError, AssertionError, RecursionError),
)
"""The errors that a damaged value may cause."""

MAX_STEP = 20_000_000
"""Maximum number of a step, because some arrays have one element for each step."""

Data = TypeVar("Data")


class DamageError(ValueError):
    """A value is damaged.  The text is a clause that names the value."""


def encoded(value: Any) -> str:
    """Return dataclasses, lists or numbers as JSON that may contain NaN and infinity."""
    return json.dumps(value, default=dataclasses.asdict)


def from_fields(kind: type[Data], given: Mapping[str, Any]) -> Data:
    """Return a dataclass with the given fields; raise DamageError if a value has a wrong type.

    Unknown fields are ignored.  An old spec may have a strategy, task or option that is no longer
    in the catalogue.  Such a spec is returned without checks, so that old runs stay readable.
    """
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    values = {}
    for entry in fields:
        if entry.name in given:
            try:
                values[entry.name] = value = decoded(given[entry.name], entry.type)
                if entry.name in ("created", "heartbeat"):
                    time.localtime(value)  # raises an error if the year is not possible
                if entry.name == "source":  # the only text with several lines
                    values[entry.name] = CONTROL.sub("", given[entry.name])
                if entry.name in ("name", "comparison") and len(value) > MAX_NAME:
                    raise ValueError("too long")
            except DAMAGES as error:
                raise DamageError(f"the {entry.name} is damaged") from error
    try:
        return kind(**values)
    except UserError:
        made = object.__new__(kind)  # skips the checks of kind(...)
        for entry in fields:
            object.__setattr__(made, entry.name, values.get(entry.name, entry.default))
        return made


def decoded(value: Any, kind: Any) -> Any:
    """Return a value of the type ``kind``; raise one of ``DAMAGES`` if the value does not fit.

    Args:
        value: the value of a column, or JSON, or a value inside JSON.
        kind: the annotation of a field, such as ``tuple[RunSpec, ...]``.
    """
    whole, parts = typing.get_origin(kind), typing.get_args(kind)
    if whole is UnionType:  # such as float | None
        return None if value is None else decoded(value, parts[0])
    if isinstance(value, str | bytes) and len(value) > MAX_VALUE_BYTES:
        raise ValueError("too large")
    if kind is str:
        return re.sub(r"\s", " ", CONTROL.sub("", value))
    if whole is None and (isinstance(value, kind) or (kind, type(value)) == (float, int)):
        return value
    if whole is None and issubclass(kind, Enum):
        return kind(value)
    if isinstance(value, str):
        value = json.loads(value or "[]")
    if whole is Mapping:
        return {decoded(name, str): decoded(each, parts[1]) for name, each in value.items()}
    if dataclasses.is_dataclass(kind):
        names = [entry.name for entry in dataclasses.fields(kind)]
        given = dict(zip(names, value, strict=True)) if isinstance(value, list) else value
        return from_fields(typing.cast(type, kind), given)
    if not isinstance(value, list) or not issubclass(whole or kind, tuple):
        raise TypeError(kind)
    if whole is None:  # a named tuple of numbers
        return kind(*(decoded(each, float) for each in value))
    kinds = parts[:1] * len(value) if parts[-1] is ... else parts
    return tuple(decoded(each, part) for each, part in zip(value, kinds, strict=True))


def stored_batch(row: sqlite3.Row, run_id: str, header: RunHeader | None = None) -> EventBatch:
    """Return a row of the table ``batches`` as a batch with the header of the run."""
    known = {"run_id": run_id, "header": header, "rows": row["events"]}
    batch = from_fields(EventBatch, {**row, **known})
    rows = np.frombuffer(batch.rows, dtype=EVENT)
    numbers = np.concatenate([rows["step"], rows["staleness"], [0]])
    is_sound = np.all(rows["rank"] == batch.rank) and np.all(np.isfinite(rows["seconds"]))
    if not is_sound or numbers.min() < NO_STALENESS or numbers.max() > MAX_STEP:
        raise ValueError("damaged steps")
    return batch
