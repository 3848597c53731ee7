"""The results of a comparison as tables: one row per run, strategy, step or evaluation.

Every output of ddpnb is computed from the tables of runs and strategies.  Speeds, losses over time
and parts of a step are computed from the steps of the runs.  Scores and the final loss come from
evaluations.  The ranks report bytes received, memory and lost samples.  Runs in the kernel.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.messages import NO_STALENESS, Evaluation, Memory, Parts
from ddpnb.protocol.notation import Target
from ddpnb.results.comparison import Comparison
from ddpnb.results.curve import first_reached, smoothed, tenths
from ddpnb.results.notes import notes_of
from ddpnb.results.rows import metrics_of
from ddpnb.results.run import RunSnapshot, Status

if TYPE_CHECKING:
    import pandas as pd

SHORT_SECONDS = 4.0
"""Minimum training seconds to measure a strategy's speed reliably."""

Row = dict[str, Any]
"""One row of a table: a value for each column."""

SETTINGS = ("task", "num_epochs", "batch_size", "learning_rate", "seed", "devices", "link")
CIRCUMSTANCES = ("momentum", "num_workers", "num_threads", "device", "backend", "num_parameters")
STEP_COLUMNS = ("rank", "step", "seconds", "num_samples", "loss", "staleness", "num_bytes_sent")
MEANS = (*(f"{name}_seconds" for name in Parts._fields), "bytes_sent_per_step")
MEMORY_COLUMNS = tuple(f"memory_{name}" for name in (*Memory._fields, "total"))
SCORES = ("final_loss", "held_out_loss", "held_out_accuracy")
SCORE_PREFIXES = ("held_out_", "last_")
"""The prefixes of columns with the scores that a cell defines."""


def runs_frame(comparison: Comparison, target: Target | None = None) -> "pd.DataFrame":
    """Return one row per run, with the run's settings, environment and results."""
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    return pd.DataFrame(run_rows(comparison, target))


def strategies_frame(comparison: Comparison, target: Target | None = None) -> "pd.DataFrame":
    """Return one row per strategy of each comparison among the runs.

    Args:
        comparison: the comparison with the runs.
        target: the target for ``seconds_to_target``; None if there is no target.
    """
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    return pd.DataFrame(strategy_rows(comparison, target))


def run_rows(comparison: Comparison, target: Target | None = None) -> list[Row]:
    """Return the rows of ``runs_frame``.

    Speed-up and efficiency are relative to the same repeat's baseline.  A run that still trains
    cannot be the reference of other runs.
    """
    is_compared = set(map(id, comparison.runs))
    rows = [_run_row(run, target) for run in comparison.all_runs]
    num_before = Counter[tuple[str, str]]()
    speeds = {}
    for run, row in zip(comparison.all_runs, rows, strict=True):
        key = row["comparison"], row["strategy"]
        row["is_compared"] = id(run) in is_compared
        if run.spec is None:  # hand-written loops are numbered in order
            num_before[key] += 1
            row["repeat"] = num_before[key]
        if row["is_compared"] and not run.is_running:
            speeds[*key, row["repeat"]] = row["samples_per_second"]
    for row in rows:
        single, ceiling = (
            speeds.get((row["comparison"], name, row["repeat"]), math.nan)
            for name in (BASELINE, CEILING)
        )
        speed, is_baseline = row["samples_per_second"], row["strategy"] == BASELINE
        ideal = (row["num_devices"] or math.nan) * single
        row["speed_up"] = speed / single
        row["efficiency"] = speed / ideal
        row["machine"] = math.nan if is_baseline else ceiling / ideal
        row["communication"] = math.nan if is_baseline else speed / ceiling
    return rows


def _run_row(run: RunSnapshot, target: Target | None) -> Row:
    spec, header, reports = run.spec, run.header, run.reports
    settings = {name: getattr(spec, name, None) for name in SETTINGS}
    if spec is not None and header is not None:
        settings["batch_size"] = spec.global_batch(header.num_workers)
    num_workers = header.num_workers if header else len(run.ranks) if spec is None else 0
    num_steps = run.num_events
    parts = np.sum([Parts(), *(rank.parts for rank in run.ranks)], axis=0) / max(num_steps, 1)
    sent = sum(rank.num_bytes_sent for rank in run.ranks)
    received = sum(report.num_bytes_received for report in reports)
    num_reported = sum(report.num_steps for report in reports)
    memory = max((each.memory for each in reports), key=lambda m: m.total, default=Memory())
    seconds, samples = (math.nan, math.nan) if target is None else _reached(run, target)
    rates = tenths(run.curve).tolist()
    return {
        "comparison": run.comparison,
        "strategy": run.name,
        "repeat": run.repeat + 1,
        "status": run.status.value,
        **settings,
        **{name: getattr(header, name, None) for name in CIRCUMSTANCES},
        "num_workers": num_workers,
        "num_devices": (header.num_devices if header else 0) or num_workers,
        "num_steps": num_steps,
        "num_samples": run.num_samples,
        "seconds": run.seconds,
        "samples_per_second": run.samples_per_second,
        **dict.fromkeys(("speed_up", "efficiency", "machine", "communication"), math.nan),
        "slowest_tenth": min(rates, default=math.nan),
        "fastest_tenth": max(rates, default=math.nan),
        **({} if target is None else {"seconds_to_target": seconds, "samples_to_target": samples}),
        **{name: run.reported(name) for name in SCORES},
        **{f"held_out_{name}": value for name, value in run.metrics.items()},
        **{f"last_{name}": value for name, value in run.last.items()},
        "num_held_out": max((report.num_held_out for report in reports), default=0),
        "chose_rate": spec is not None and bool(spec.rates) and run.repeat == 0,
        "staleness_median": _median_of(run.staleness),
        "staleness_max": _max_of(run.staleness),
        **dict(zip(MEANS, [*parts.tolist(), sent / num_steps if sent else math.nan], strict=True)),
        "bytes_received_per_step": received / num_reported if received else math.nan,
        **dict(zip(MEMORY_COLUMNS, (*memory, memory.total), strict=True)),
        "num_lost_samples": max((report.num_lost_samples for report in reports), default=0),
        "num_diverged": run.num_diverged,
        "is_ceiling": run.is_ceiling,
        "is_emulated": header is not None and header.is_emulated,
        "is_computed": spec is not None and spec.is_emulated,
        "notes": "; ".join(run.notes),
    }


def strategy_rows(comparison: Comparison, target: Target | None = None) -> list[Row]:
    """Return the rows of ``strategies_frame``, in the order of the strategies' first runs.

    Only finished runs count, if there are any.
    """
    every = zip(comparison.all_runs, run_rows(comparison, target), strict=True)
    row_of = {id(run): row for run, row in every}
    groups: dict[tuple[str, str], list[RunSnapshot]] = {}
    for run in comparison.runs:
        groups.setdefault((run.comparison, run.name), []).append(run)
    several = len({name for name, _ in groups}) > 1
    rows = [_strategy_row(runs, row_of, several) for runs in groups.values()]
    settled = {
        (row["comparison"], row["strategy"]): row["samples_per_second"]
        for row in rows
        if row["status"] != Status.RUNNING.value
    }
    for row in rows:
        single, ceiling = (
            settled.get((row["comparison"], name), math.nan) for name in (BASELINE, CEILING)
        )
        row["ideal"] = (row["num_devices"] or math.nan) * single
        row["ceiling"] = ceiling
    return rows


def _strategy_row(runs: Sequence[RunSnapshot], row_of: Mapping[int, Row], several: bool) -> Row:
    counted = [run for run in runs if run.status is Status.FINISHED] or list(runs)
    rows = [row_of[id(run)] for run in counted]
    first = rows[0]
    judged = [row for row in rows if not row["chose_rate"]] or rows

    def most(name: str) -> Any:
        return max(row[name] for row in rows)

    def values(name: str, chosen: Iterable[Row] = rows) -> list[float]:
        return [row.get(name, math.nan) for row in chosen]

    comparison, name = first["comparison"], first["strategy"]
    label = f"{comparison}/{name}" if several and comparison not in ("", name) else name
    is_emulated = any(row_of[id(run)]["is_emulated"] for run in runs)
    staleness = staleness_counts(counted)
    speed_up, machine = (_geometric(values(each)) for each in ("speed_up", "machine"))
    efficiency = speed_up / (most("num_devices") or math.nan)
    communication = efficiency / machine
    if math.isnan(communication):
        communication = _geometric(values("communication"))
    weights = values("num_steps")
    means = {
        each: float(np.average(values(each), weights=weights)) if any(weights) else math.nan
        for each in MEANS
    }
    step = sum(means[each] for each in MEANS[: len(Parts._fields)]) - means["hidden_seconds"]
    exposed = (means["communication_seconds"] + means["waiting_seconds"]) / (step or math.nan)
    is_timed = exposed > 0 or means["hidden_seconds"] > 0 or name == CEILING
    sees_exposed = all(run.header.sees_exposed for run in counted if run.header)
    largest = max(rows, key=lambda row: int(row["memory_total"]))
    scores = [each for each in {key: 0 for row in rows for key in row} if is_score(each)]
    missed = [seconds for seconds in values("seconds_to_target") if math.isinf(seconds)]
    return {
        "comparison": comparison,
        "strategy": name,
        "label": f"{label} (emulated)" if is_emulated else label,
        "status": counted[-1].status.value,
        "num_runs": len(counted),
        "num_workers": most("num_workers"),
        "num_devices": most("num_devices"),
        "learning_rate": first["learning_rate"] or math.nan,
        "is_tuned": any(row["chose_rate"] for row in rows),
        **_spread("samples_per_second", values("samples_per_second"), _geometric),
        "speed_up": speed_up,
        "efficiency": efficiency,
        "machine": machine,
        "communication": communication,
        "ideal": math.nan,
        "ceiling": math.nan,
        **_spread("seconds_to_target", values("seconds_to_target")),
        **_spread("samples_to_target", values("samples_to_target")),
        "num_missed_target": len(missed),
        **{k: v for each in scores for k, v in _spread(each, values(each, judged)).items()},
        "num_scored": len(judged),
        "num_held_out": most("num_held_out"),
        "staleness_median": _median_of(staleness),
        "staleness_max": _max_of(staleness),
        **means,
        "step_seconds": step,
        "exposed": exposed if is_timed and sees_exposed else math.nan,
        "bytes_received_per_step": _mean(values("bytes_received_per_step")),
        **{each: largest[each] for each in MEMORY_COLUMNS},
        "num_lost_samples": most("num_lost_samples"),
        "num_diverged": sum(run.num_diverged for run in runs),
        "is_ceiling": any(run.is_ceiling for run in counted),
        "is_emulated": is_emulated,
        "is_computed": any(row["is_computed"] for row in rows),
        "is_short": not first["is_computed"]
        and any(row["status"] == "finished" and 0 < row["seconds"] < SHORT_SECONDS for row in rows)
        and counted[0].spec is not None,
        "notes": notes_of(runs),
    }


def is_score(column: str) -> bool:
    """Return True if a column of the runs is a score of the trained model."""
    return column in SCORES or column.startswith(SCORE_PREFIXES)


def _spread(
    name: str, values: Sequence[float], middle: Callable[[Sequence[float]], float] = median
) -> Row:
    """Return the middle of the values that are not NaN, and their range if there are several."""
    known = [value for value in values if not math.isnan(value)]
    low, high = (min(known), max(known)) if len(known) > 1 else (math.nan, math.nan)
    whole = middle(known) if known else math.nan
    return {name: whole, f"{name}_low": low, f"{name}_high": high}


def _geometric(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value) and value > 0]
    return geometric_mean(known) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def staleness_counts(runs: Sequence[RunSnapshot]) -> NDArray[np.int64]:
    """Return the numbers of updates with staleness 0, 1, 2 ... in all runs together."""
    counts = zip_longest(*(run.staleness for run in runs), fillvalue=0)
    return np.array([sum(each) for each in counts], dtype=np.int64)


def _median_of(counts: NDArray[np.int64]) -> float:
    """Return the median of numbers that are counted as 0, 1, 2 ...; NaN if there are none."""
    below = np.cumsum(counts)
    if len(counts) == 0 or below[-1] == 0:
        return math.nan
    middle = (below[-1] - 1) // 2, below[-1] // 2
    return float(np.searchsorted(below, middle, side="right").mean())


def _max_of(counts: NDArray[np.int64]) -> float:
    return float(len(counts) - 1) if len(counts) else math.nan


def _reached(run: RunSnapshot, target: Target) -> tuple[float, float]:
    """Return the seconds and samples until a run reached the target.

    Both are infinite if the finished run never reached it, and NaN if this is unknown.
    """
    if target.is_accuracy and not run.evaluations:
        return math.nan, math.nan
    never = math.inf if run.status is Status.FINISHED else math.nan
    seconds, samples = time_to_target(run, target)
    return (never, never) if math.isnan(seconds) else (seconds, samples)


def time_to_target(run: RunSnapshot, target: Target) -> tuple[float, float]:
    """Return the seconds and samples until a run first reached ``target``; NaN if it never did.

    The smoothed training loss must fall to the target, or the held-out accuracy must rise to it.
    Between two evaluations, the accuracy is interpolated linearly.
    """
    if target.is_accuracy:
        found = np.array(run.evaluations, dtype=np.float64).reshape(-1, len(Evaluation._fields))
        samples, seconds, _, accuracy = found.T
        falling, goal = -accuracy, -target.value
    else:
        falling, goal = smoothed(run.curve), target.value
        seconds, samples = run.curve.seconds, run.curve.samples
    return first_reached(falling, seconds, goal), first_reached(falling, samples, goal)


def evaluations_frame(comparison: Comparison) -> "pd.DataFrame":
    """Return a DataFrame with one row per evaluation on held-out samples.

    The last row of a run is the evaluation of the trained model.  This row also has ``final_loss``,
    the loss on training samples, and the values of the metrics that the cell defines.
    """
    import pandas as pd  # noqa: PLC0415 - takes 0.5 s

    rows: list[Row] = []
    for run in comparison.runs:
        names = {"comparison": run.comparison, "strategy": run.name, "repeat": run.repeat + 1}
        found = [names | each._asdict() for each in run.evaluations or run.trained_model]
        if found and run.status is Status.FINISHED:
            metrics = {f"held_out_{name}": value for name, value in run.metrics.items()}
            found[-1] |= {"final_loss": run.reported("final_loss"), **metrics}
        rows += found
    columns = ["comparison", "strategy", "repeat", *Evaluation._fields, "final_loss"]
    own = {name for row in rows for name in row if name not in columns}
    return pd.DataFrame(rows, columns=[*columns, *sorted(own)])


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


def _step_columns(run: RunSnapshot) -> dict[str, Any]:
    events = run.events
    columns = {"comparison": run.comparison, "strategy": run.name, "repeat": run.repeat + 1}
    columns |= {name: events[name] for name in STEP_COLUMNS}
    columns |= {f"{part}_seconds": _exact(events[part]) for part in Parts._fields}
    for name, field in metrics_of(events).items():
        columns[f"metric_{name}" if name in columns else name] = events[field]
    return columns


def _exact(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return 32-bit numbers as 64-bit numbers with the same seven digits."""
    wide = values.astype(np.float64)
    with np.errstate(divide="ignore"):
        digits = 6 - np.floor(np.log10(np.abs(wide)))
    scale = 10.0 ** np.where(np.isfinite(digits), np.minimum(digits, 300), 0)
    return np.round(wide * scale) / scale
