"""Converts a stored comparison into input of the scaling model.  Runs in the kernel."""

import math
import platform
from collections.abc import Mapping, Sequence

import numpy as np

from ddpnb.prediction.calibrate import Measured, SizeClass, calibrate
from ddpnb.prediction.predict import Question, answer
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.cores import num_cores
from ddpnb.protocol.errors import UserError
from ddpnb.reports.inspection.prediction import PredictionResult
from ddpnb.results.comparison import Comparison
from ddpnb.results.frames import Row, strategy_rows
from ddpnb.results.query import resolve
from ddpnb.results.run import RunSnapshot, Status
from ddpnb.results.store import Store

NEEDED = (BASELINE, CEILING)
FEWEST_MEASURED_STEPS = 4
"""A median of step times is computed only from at least this number of steps of equal size."""
FLOAT_BYTES = 4


def predicted(store: Store, question: Question, run: str = "") -> PredictionResult:
    """Return a prediction from a stored comparison (default: the latest of this machine)."""
    measured = measured_in(_comparison(store, run))
    return PredictionResult(answer(calibrate(measured), question))


def measured_in(comparison: Comparison) -> Measured:
    """Compute the scaling model's input from a comparison; raise UserError if a run is missing."""
    rows = {row["strategy"]: row for row in strategy_rows(comparison) if _counts(row)}
    if missing := [name for name in NEEDED if name not in rows]:
        raise UserError(
            f"A prediction needs single and no-comm, but {comparison.name} has no finished run of "
            f"{' or '.join(missing)}. Compare again without --no-baseline."
        )
    runs = {
        name: [r for r in comparison.runs if r.name == name and r.status is Status.FINISHED]
        for name in rows
    }
    single, together = runs[BASELINE], runs[CEILING]
    spec, header = single[0].spec, together[0].header
    assert spec is not None
    assert header is not None
    devices = spec.emulated
    if devices and (spec.slow or spec.kill):
        raise UserError(
            f"{comparison.name} was trained with --slow or --kill, so it cannot be used for a "
            "prediction. Compare without these options, or choose a comparison with --run."
        )
    fewest = 1 if devices else FEWEST_MEASURED_STEPS
    split = rows[BASELINE]
    passes = sum(split[f"{name}_seconds"] for name in ("data", "forward", "backward"))
    num, host = (comparison.environment.get(key, "") for key in ("CPU cores", "host"))
    return Measured(
        name=comparison.name,
        batch_size=spec.batch_per_worker or spec.batch_size,
        is_weak=bool(spec.batch_per_worker),
        num_ranks=header.num_workers,
        num_bytes=_num_bytes({} if devices else rows, header.num_parameters, header.num_workers),
        alone=_sizes(single, fewest),
        together=_sizes(together, fewest),
        rates={name: row["samples_per_second"] for name, row in rows.items()},
        backward_share=split["backward_seconds"] / passes if passes > 0 else 2 / 3,
        optimizer_seconds=split["optimizer_seconds"],
        variation=_variation(together),
        device=header.device.partition(":")[0],
        cores=float(num.split(",")[0] or num_cores()),
        devices=devices,
        jitter=spec.jitter,
        num_passes=spec.accumulate,
        short=tuple(name for name, row in rows.items() if row["is_short"] and not devices),
        place="this machine" if host in ("", platform.node()) else f"host {host}",
    )


def _comparison(store: Store, run: str) -> Comparison:
    stored = store.list()
    if run:
        return store.load(resolve(run, stored)[-1].comparison_id)
    names: dict[str, set[str]] = {}
    for each in stored:
        if each.status is Status.FINISHED:
            names.setdefault(each.comparison_id, set()).add(each.name)
    usable = [identity for identity, found in names.items() if found.issuperset(NEEDED)]
    if not usable:
        raise UserError(
            "No stored comparison has both single and no-comm, which a prediction needs. "
            "Run %ddp_compare ddp first."
        )
    newest_first = map(store.load, reversed(usable))
    here = (each for each in newest_first if each.environment.get("host") == platform.node())
    return next(here, None) or store.load(usable[-1])


def _counts(row: Row) -> bool:
    is_measured = math.isfinite(row["samples_per_second"])
    return row["status"] == "finished" and is_measured and not row["is_emulated"]


def _steps(runs: Sequence[RunSnapshot]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays: the number of samples, the seconds and the rank of each step."""
    rows = np.concatenate([run.events for run in runs])
    parts = ("data", "forward", "backward", "communication", "optimizer", "waiting")
    seconds = np.sum([rows[part].astype(float) for part in parts], axis=0)
    return rows["num_samples"], seconds, rows["rank"]


def _sizes(runs: Sequence[RunSnapshot], fewest: int) -> tuple[SizeClass, ...]:
    samples, seconds, _ = _steps(runs)
    found = []
    for size in np.unique(samples[samples > 0]):
        own = seconds[samples == size]
        if len(own) >= fewest and np.median(own) > 0:
            found.append(SizeClass(int(size), float(np.median(own)), len(own)))
    if not found:
        found = [SizeClass(int(samples.max()), float(np.median(seconds)), len(samples))]
    return tuple(found)


def _variation(runs: Sequence[RunSnapshot]) -> float:
    """Return the relative spread of step times on a rank, for the most frequent step size."""
    samples, seconds, ranks = _steps(runs)
    sizes, counts = np.unique(samples, return_counts=True)
    chosen = samples == sizes[np.argmax(counts)]
    shares = []
    for rank in np.unique(ranks[chosen]):
        own = seconds[chosen & (ranks == rank)]
        low, middle, high = np.percentile(own, [16, 50, 84])
        if middle > 0:
            shares.append((high - low) / 2 / middle)
    return float(np.mean(shares)) if shares else 0.0


def _num_bytes(rows: Mapping[str, Row], num_parameters: int, num_ranks: int) -> float:
    """Return the size of the gradients in bytes; 4 bytes per parameter if ``ddp`` did not run."""
    sent = rows["ddp"]["bytes_sent_per_step"] if "ddp" in rows else math.nan
    if math.isfinite(sent) and num_ranks > 1:
        return float(sent * num_ranks / (2 * (num_ranks - 1)))
    return float(FLOAT_BYTES * num_parameters)
