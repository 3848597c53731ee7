"""A comparison as event files for TensorBoard, written by TensorBoard's own writer (kernel).

One folder per run, e.g. ``race/ddp/1``.  The step of a point is the number of samples seen by all
workers.  Its time is the training time since the run began, so that the "relative" axis shows
training seconds.
"""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpnb.history.align import make_aligner
from ddpnb.history.model import RunSnapshot
from ddpnb.history.summary import reported, samples_per_second
from ddpnb.protocol.errors import UserError
from ddpnb.reports.result import ComparisonResult

Point = tuple[str, int, float, float]
"""Tag, samples seen, training seconds, value."""


def write_events(result: ComparisonResult, folder: Path) -> str:
    """Write one folder of event files per run.

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
    for run in result.comparison.runs:
        is_own = run.comparison == result.comparison.name  # else several were put together
        above = folder if is_own else folder / run.comparison
        _write(above / run.name.replace("/", "-") / str(run.repeat + 1), run)
    return f"{len(result.comparison.runs)} runs for tensorboard --logdir {folder}"


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
    events, samples = run.events, run.num_samples_before
    aligner = make_aligner(run.header, run.spec)
    aligner.end()  # the run is over: no rank is waited for
    updates = aligner.add(events)
    columns = (updates.weight.tolist(), updates.seconds.tolist(), updates.loss.tolist())
    for weight, seconds, loss in zip(*columns, strict=True):
        samples += int(weight)
        yield "loss", samples, seconds, loss
    seen = run.num_samples_before + events["num_samples"].cumsum()
    for name, rows in run.metrics.items():
        for index, value in zip(rows["event"].tolist(), rows["value"].tolist(), strict=True):
            yield name, int(seen[index]), float(events["seconds"][index]), value


def _results(run: RunSnapshot) -> Iterator[Point]:
    events = run.events
    samples = run.num_samples_before + int(events["num_samples"].sum())
    seconds = float(events["seconds"].max(initial=0.0))
    yield "samples per second", samples, seconds, samples_per_second(run)
    yield "final loss", samples, seconds, reported(run, lambda report: report.final_loss)
    yield "held-out loss", samples, seconds, reported(run, lambda report: report.held_out_loss)
    accuracy = reported(run, lambda report: report.held_out_accuracy)
    yield "held-out accuracy", samples, seconds, accuracy
