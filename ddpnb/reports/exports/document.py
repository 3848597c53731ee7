"""A comparison as one JSON document (kernel).

    {"format": 1,
     "comparison": {"name", "created", "task", "source", "environment": {...}},
     "runs": [{"comparison", "name", "repeat", "status", "detail", "created",
               "spec": {...} or null, "header": {...} or null,
               "reports": [{...}, one per worker],
               "marks": [{"rank", "seconds", "text", "kind"}],
               "num_lost_batches",
               "steps": {"rank": [...], "step": [...], "seconds": [...], "loss": [...], ...},
               "metrics": {"name": [...]}}]}

``spec``, ``header`` and ``reports`` have the fields of ``RunSpec``, ``RunHeader`` and
``RunReport`` in ``ddpnb/protocol/messages.py``.  Under ``steps`` and ``metrics`` all lists of a
run are equally long: one entry per step of each worker, in order of arrival.  ``seconds`` are
training seconds since the run began, ``created`` is seconds since 1970 (UTC), ``staleness``
counts updates.  NaN, infinite values and missing staleness are ``null``.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.messages import NO_STALENESS
from ddpnb.reports.result import ComparisonResult

FORMAT = 1
"""Raised whenever a field changes its meaning or is removed."""


def write_json(result: ComparisonResult, path: Path) -> str:
    """Write a comparison as JSON."""
    text = json.dumps(document(result.comparison), allow_nan=False)
    path.write_text(text, encoding="utf-8")
    return f"{len(result.comparison.runs)} runs with every step"


def document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison in the layout above."""
    return {
        "format": FORMAT,
        "comparison": {
            "name": comparison.name,
            "created": comparison.created,
            "task": comparison.task,
            "source": comparison.source,
            "environment": dict(comparison.environment),
        },
        "runs": [_run(run) for run in comparison.runs],
    }


def _run(run: RunSnapshot) -> dict[str, Any]:
    events = run.events
    steps = {name: _numbers(events[name]) for name in events.dtype.names or ()}
    steps["staleness"] = [None if n == NO_STALENESS else n for n in events["staleness"].tolist()]
    return {
        "comparison": run.comparison,
        "name": run.name,
        "repeat": run.repeat + 1,
        "status": run.status.value,
        "detail": run.detail,
        "created": run.created,
        "spec": _fields(run.spec),
        "header": _fields(run.header),
        "reports": [_fields(report) for report in run.reports],
        "marks": [_fields(mark) for mark in run.marks],
        "num_lost_batches": run.num_lost_batches,
        "steps": steps,
        "metrics": {name: _per_step(rows, len(events)) for name, rows in run.metrics.items()},
    }


def _fields(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: _number(entry) for name, entry in dataclasses.asdict(value).items()}


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(column: Any) -> list[Any]:
    return [_number(value) for value in column.tolist()]


def _per_step(rows: Any, length: int) -> list[Any]:
    """Return one number per step; ``None`` for steps without one."""
    values = np.full(length, np.nan)
    values[rows["event"]] = rows["value"]
    return _numbers(values)
