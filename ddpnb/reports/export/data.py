"""Conversion of a comparison to tidy DataFrames.  Runs in the kernel."""

from typing import TYPE_CHECKING, Any

from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.messages import NO_STALENESS, Evaluation, Parts
from ddpnb.results.comparison import Comparison
from ddpnb.results.model import RunSnapshot, Status
from ddpnb.results.rows import metrics_of
from ddpnb.results.summary import (
    evaluations,
    num_devices,
    reported_metrics,
    samples_per_second,
    summarise,
    trained_model,
)

if TYPE_CHECKING:
    import pandas as pd

SETTINGS = ("task", "num_epochs", "batch_size", "learning_rate", "seed", "devices", "link")
CIRCUMSTANCES = ("momentum", "num_workers", "num_threads", "device", "backend", "num_parameters")
STEP = ("rank", "step", "seconds", "num_samples", "loss", "staleness", "num_bytes_sent")


def runs_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return a DataFrame with one row per run, with the run's settings, environment and results."""
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    frame = pd.DataFrame([_run_row(run, comparison) for run in comparison.all_runs])
    if comparison.other_rates:
        frame["is_compared"] = [run in comparison.runs for run in comparison.all_runs]
    return frame


def evaluations_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return a DataFrame with one row per evaluation on held-out samples.

    The last row of a run is the evaluation of the trained model.  This row also has ``final_loss``,
    the loss on training samples, and the values of the metrics that the cell defines.
    """
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    rows: list[dict[str, object]] = []
    for run in comparison.runs:
        names = {"comparison": run.comparison, "strategy": run.name, "repeat": run.repeat + 1}
        found = [names | each._asdict() for each in evaluations(run) or trained_model(run)]
        if found and run.status is Status.FINISHED:
            found[-1] |= _final_scores(run)
        rows += found
    columns = ["comparison", "strategy", "repeat", *Evaluation._fields, "final_loss"]
    own = {name for row in rows for name in row if name not in columns}
    return pd.DataFrame(rows, columns=[*columns, *sorted(own)])


def _final_scores(run: RunSnapshot) -> dict[str, object]:
    """Return the final training loss, and the values of the metrics that the cell defines."""
    own = {f"held_out_{name}": value for name, value in reported_metrics(run).items()}
    return {"final_loss": run.reported("final_loss"), **own}


def steps_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return a DataFrame with one row per step of each worker and one column per logged metric."""
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    if not comparison.runs:
        return pd.DataFrame()
    frames = [pd.DataFrame(_step_columns(run)) for run in comparison.runs]
    steps = pd.concat(frames, ignore_index=True)
    staleness = steps["staleness"].astype("Int64")
    steps["staleness"] = staleness.mask(staleness == NO_STALENESS)
    return steps


def _run_row(run: RunSnapshot, comparison: Comparison) -> dict[str, object]:
    """Return a run's row.  Speed-up and efficiency are relative to the same repeat's baseline."""
    place, names = (run.comparison, run.repeat), {BASELINE, CEILING} - {run.name}
    beside = [
        other
        for other in comparison.runs
        if (other.comparison, other.repeat) == place and other.name in names
    ]
    *_, summary = summarise(comparison.with_runs([*beside, run]))
    settings = {name: getattr(run.spec, name, None) for name in SETTINGS}
    if run.spec is not None and run.header is not None:
        settings["batch_size"] = run.spec.global_batch(run.header.num_workers)
    return {
        "comparison": run.comparison,
        "strategy": run.name,
        "repeat": run.repeat + 1,
        "status": run.status.value,
        **settings,
        **{name: getattr(run.header, name, None) for name in CIRCUMSTANCES},
        "num_steps": run.num_events,
        "num_samples": run.num_samples,
        "seconds": run.seconds,
        "samples_per_second": samples_per_second(run),
        "held_out_loss": run.reported("held_out_loss"),
        "held_out_accuracy": run.reported("held_out_accuracy"),
        **_final_scores(run),
        "staleness_median": summary.staleness_median,
        "staleness_max": summary.staleness_max,
        **{f"{name}_seconds": each for name, each in summary.split.parts._asdict().items()},
        "bytes_sent_per_step": summary.split.num_bytes_sent,
        "bytes_received_per_step": summary.bytes_received,
        **{f"memory_{part}": value for part, value in summary.memory._asdict().items()},
        "notes": "; ".join(run.notes),
        "num_devices": num_devices(run),
        "speed_up": summary.speed_up,
        "efficiency": summary.efficiency,
        "machine": summary.machine,
        "communication": summary.share_of_ceiling,
    }


def _step_columns(run: RunSnapshot) -> dict[str, Any]:
    events = run.events
    columns = {"comparison": run.comparison, "strategy": run.name, "repeat": run.repeat + 1}
    columns |= {name: events[name] for name in STEP}
    columns |= {f"{part}_seconds": events[part] for part in Parts._fields}
    for name, field in metrics_of(events).items():
        columns[f"metric_{name}" if name in columns else name] = events[field]
    return columns
