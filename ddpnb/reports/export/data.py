"""A comparison as data for other tools (kernel): DataFrames, a JSON document, TensorBoard's events.

The JSON document:

    {"format": 2,
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
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpnb.history.align import make_aligner
from ddpnb.history.claims import Ratio, Ratios, ratios_of
from ddpnb.history.comparison import Comparison
from ddpnb.history.database import Floats, Records
from ddpnb.history.metrics import efficiency_of, step_split
from ddpnb.history.model import RunSnapshot
from ddpnb.history.summary import (
    bytes_received,
    evaluations,
    memory_of,
    num_devices,
    reported,
    reported_metrics,
    samples_per_second,
    staleness_counts,
    staleness_median,
    summarise,
    training_seconds,
)
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import NO_STALENESS, Evaluation, Parts

if TYPE_CHECKING:
    import pandas as pd

SETTINGS = ("task", "num_epochs", "batch_size", "learning_rate", "seed", "devices", "link")
CIRCUMSTANCES = ("momentum", "num_workers", "num_threads", "device", "backend", "num_parameters")
STEP = ("rank", "step", "seconds", "num_samples", "loss", "staleness", "num_bytes_sent")

FORMAT = 2
"""Of the JSON document; raised whenever a field changes its meaning or is removed."""

Point = tuple[str, int, float, float]
"""Tag, samples seen, training seconds, value."""


def runs_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return one row per run: its settings, where it ran, its results."""
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    ratios = ratios_of(summarise(comparison))
    rates = {
        (run.comparison, run.name, run.repeat): samples_per_second(run)
        for run in comparison.runs
        if not run.is_running
    }
    frame = pd.DataFrame(
        [
            _run_row(run) | _efficiency(run, rates) | _speed_ratio(run, ratios)
            for run in comparison.all_runs
        ]
    )
    if comparison.other_rates:
        frame["is_compared"] = [run in comparison.runs for run in comparison.all_runs]
    return frame


def evaluations_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return one row per evaluation on held-out samples: the copies', then the trained model's."""
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    columns = ("comparison", "strategy", "repeat", *Evaluation._fields)
    rows = [
        (run.comparison, run.name, run.repeat + 1, *each)
        for run in comparison.runs
        for each in evaluations(run)
    ]
    return pd.DataFrame(rows, columns=list(columns))


def steps_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return one row per step of each worker; with a column for each of the user's own metrics."""
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    if not comparison.runs:
        return pd.DataFrame()
    frames = [pd.DataFrame(_step_columns(run)) for run in comparison.runs]
    steps = pd.concat(frames, ignore_index=True)
    staleness = steps["staleness"].astype("Int64")
    steps["staleness"] = staleness.mask(staleness == NO_STALENESS)
    return steps


def document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as the JSON document above."""
    return {
        "format": FORMAT,
        "comparison": {
            "name": comparison.name,
            "created": comparison.created,
            "task": comparison.task,
            "source": comparison.source,
            "environment": dict(comparison.environment),
        },
        "runs": [_run(run) for run in comparison.all_runs],
    }


def write_events(comparison: Comparison, folder: Path) -> None:
    """Write one folder of event files per run, e.g. ``ddp/1``, with TensorBoard's own writer.

    The step of a point is the number of samples seen by all workers.  Its time is the training
    time since the run began, so that the "relative" axis shows training seconds.

    Raises:
        UserError: TensorBoard is not installed, or the folder already holds events.
    """
    if find_spec("tensorboard") is None:
        raise UserError(
            "TensorBoard is not installed: pip install 'ddpnb[tensorboard]' in a terminal, "
            "or name a file that ends with .csv or .json."
        )
    if any(folder.glob("**/events.out.tfevents.*")):
        raise UserError(f"{folder} already holds TensorBoard events: name another folder.")
    for run in comparison.runs:
        is_own = run.comparison == comparison.name  # else several were put together
        above = folder if is_own else folder / run.comparison
        _write(above / run.name.replace("/", "-") / str(run.repeat + 1), run)


def _run_row(run: RunSnapshot) -> dict[str, object]:
    stale, split = staleness_counts([run]), step_split([run])
    return {
        "comparison": run.comparison,
        "strategy": run.name,
        "repeat": run.repeat + 1,
        "status": run.status.value,
        **{name: getattr(run.spec, name, None) for name in SETTINGS},
        **_global_batch(run),
        **{name: getattr(run.header, name, None) for name in CIRCUMSTANCES},
        "num_steps": run.aggregate.num_events,
        "num_samples": run.aggregate.num_samples,
        "seconds": training_seconds(run),
        "samples_per_second": samples_per_second(run),
        "final_loss": reported(run, lambda report: report.final_loss),
        "held_out_loss": reported(run, lambda report: report.held_out_loss),
        "held_out_accuracy": reported(run, lambda report: report.held_out_accuracy),
        **{f"held_out_{name}": value for name, value in reported_metrics(run).items()},
        "staleness_median": staleness_median(stale),
        "staleness_max": float(len(stale) - 1) if len(stale) else np.nan,
        **{f"{name}_seconds": getattr(split.parts, name) for name in Parts._fields},
        "bytes_sent_per_step": split.num_bytes_sent,
        "bytes_received_per_step": bytes_received([run]),
        **{f"memory_{part}": value for part, value in memory_of([run])._asdict().items()},
        "notes": "; ".join(run.header.notes) if run.header else "",
    }


def _global_batch(run: RunSnapshot) -> dict[str, int]:
    """Return the batch size, where it follows from the number of workers."""
    if run.spec is None or run.header is None:
        return {}
    return {"batch_size": run.spec.global_batch(run.header.num_workers)}


def _speed_ratio(run: RunSnapshot, ratios: Ratios | None) -> dict[str, object]:
    """Return a run's speed over that of the reference in its repeat; the strategy's interval."""
    found = Ratio() if ratios is None else ratios.speed.get((run.comparison, run.name), Ratio())
    own = math.nan
    if ratios is not None and found.num_repeats:
        own = samples_per_second(run) / ratios.reference.rates.get(run.repeat, math.nan)
    return {
        "speed_ratio": own,
        "speed_ratio_low": found.low,
        "speed_ratio_high": found.high,
        "speed_ratio_to": ratios.reference.name if ratios is not None else None,
    }


def _efficiency(run: RunSnapshot, rates: Mapping[tuple[str, str, int], float]) -> dict[str, object]:
    """Return a run's speed-up and efficiency against the other runs of its repeat."""
    single = rates.get((run.comparison, BASELINE, run.repeat), np.nan)
    ceiling = rates.get((run.comparison, CEILING, run.repeat), np.nan)
    speed, devices = samples_per_second(run), num_devices(run)
    shares = efficiency_of(
        speed / ceiling, ceiling / single, 0 if run.name == BASELINE else devices
    )
    return {
        "num_devices": devices,
        "speed_up": speed / single,
        "efficiency": speed / single / devices if devices else np.nan,
        **shares._asdict(),
    }


def _step_columns(run: RunSnapshot) -> dict[str, Any]:
    events = run.events
    columns = {"comparison": run.comparison, "strategy": run.name, "repeat": run.repeat + 1}
    columns |= {name: events[name] for name in STEP}
    columns |= {f"{part}_seconds": events[part] for part in Parts._fields}
    for name, rows in run.metrics.items():
        columns[f"metric_{name}" if name in columns else name] = _per_step(rows, len(events))
    return columns


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
        "metrics": {
            name: _numbers(_per_step(rows, len(events))) for name, rows in run.metrics.items()
        },
    }


def _fields(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: _number(entry) for name, entry in dataclasses.asdict(value).items()}


def _number(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _number(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_number(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(column: Any) -> list[Any]:
    return [_number(value) for value in column.tolist()]


def _per_step(rows: Records, num_steps: int) -> Floats:
    """Return one number per step; NaN for steps without one."""
    values = np.full(num_steps, np.nan)
    values[rows["event"]] = rows["value"]
    return values


def _write(folder: Path, run: RunSnapshot) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  may not be installed
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    writer: Any = EventFileWriter(str(folder))
    try:
        for tag, samples, seconds, value in (*_points(run), *_results(run)):
            if math.isfinite(value):
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                time = run.created + seconds
                writer.add_event(Event(wall_time=time, step=samples, summary=summary))
    finally:
        writer.close()


def _points(run: RunSnapshot) -> Iterator[Point]:
    events, samples = run.events, 0
    aligner = make_aligner(run.header, run.spec)
    aligner.end()  # the run is over: no rank is waited for
    updates = aligner.add(events)
    columns = (updates.weight.tolist(), updates.seconds.tolist(), updates.loss.tolist())
    for weight, seconds, loss in zip(*columns, strict=True):
        samples += int(weight)
        yield "loss", samples, seconds, loss
    seen = events["num_samples"].cumsum()
    for name, rows in run.metrics.items():
        for index, value in zip(rows["event"].tolist(), rows["value"].tolist(), strict=True):
            yield name, int(seen[index]), float(events["seconds"][index]), value


def _results(run: RunSnapshot) -> Iterator[Point]:
    events = run.events
    for each in evaluations(run)[:-1]:
        yield "held-out loss", each.num_samples, each.seconds, each.loss
        yield "held-out accuracy", each.num_samples, each.seconds, each.accuracy
    samples = int(events["num_samples"].sum())
    seconds = float(events["seconds"].max(initial=0.0))
    yield "samples per second", samples, seconds, samples_per_second(run)
    yield "final loss", samples, seconds, reported(run, lambda report: report.final_loss)
    yield "held-out loss", samples, seconds, reported(run, lambda report: report.held_out_loss)
    accuracy = reported(run, lambda report: report.held_out_accuracy)
    yield "held-out accuracy", samples, seconds, accuracy
    for name, value in reported_metrics(run).items():
        yield f"held-out {name}", samples, seconds, value
