"""A comparison as tidy DataFrames (kernel).

A module of its own, because importing pandas takes half a second.
"""

import numpy as np
import pandas as pd

from ddpnb.history.comparison import Comparison
from ddpnb.history.metrics import step_split
from ddpnb.history.model import RunSnapshot
from ddpnb.history.summary import (
    reported,
    samples_per_second,
    staleness_counts,
    staleness_median,
)
from ddpnb.protocol.messages import NO_STALENESS, Parts

SETTINGS = ("task", "num_epochs", "batch_size", "learning_rate", "seed")
CIRCUMSTANCES = ("num_workers", "num_threads", "device", "backend", "num_parameters")


def runs_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row per run: its settings, where it ran, its results."""
    return pd.DataFrame([_run_row(run) for run in comparison.runs])


def steps_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row per step of each worker; with a column for each of the user's own metrics."""
    frames = [_steps_of(run) for run in comparison.runs]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _run_row(run: RunSnapshot) -> dict[str, object]:
    stale, split = staleness_counts([run]), step_split([run])
    return {
        "comparison": run.comparison,
        "strategy": run.name,
        "repeat": run.repeat + 1,
        "status": run.status.value,
        **{name: getattr(run.spec, name, None) for name in SETTINGS},
        **{name: getattr(run.header, name, None) for name in CIRCUMSTANCES},
        "num_steps": run.aggregate.num_events,
        "num_samples": run.aggregate.num_samples,
        "num_samples_before": run.num_samples_before,
        "seconds": run.aggregate.seconds,
        "samples_per_second": samples_per_second(run),
        "final_loss": reported(run, lambda report: report.final_loss),
        "held_out_loss": reported(run, lambda report: report.held_out_loss),
        "held_out_accuracy": reported(run, lambda report: report.held_out_accuracy),
        "staleness_median": staleness_median(stale),
        "staleness_max": float(len(stale) - 1) if len(stale) else np.nan,
        **{f"{name}_seconds": getattr(split.parts, name) for name in Parts._fields},
        "bytes_sent_per_step": split.num_bytes_sent,
        "notes": "; ".join(run.header.notes) if run.header else "",
    }


def _steps_of(run: RunSnapshot) -> pd.DataFrame:
    names = ("rank", "step", "seconds", "num_samples", "loss", "staleness", "num_bytes_sent")
    events = run.events
    frame = pd.DataFrame({name: events[name] for name in names})
    for part in Parts._fields:
        frame[f"{part}_seconds"] = events[part]
    staleness = frame["staleness"].astype("Int64")
    frame["staleness"] = staleness.mask(staleness == NO_STALENESS)
    for name, rows in run.metrics.items():
        values = np.full(len(frame), np.nan)
        values[rows["event"]] = rows["value"]
        frame[f"metric_{name}" if name in frame else name] = values
    frame.insert(0, "repeat", run.repeat + 1)
    frame.insert(0, "strategy", run.name)
    frame.insert(0, "comparison", run.comparison)
    return frame
