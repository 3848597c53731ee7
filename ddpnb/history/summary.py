"""Every number of the final table, strategy by strategy.  (Kernel.)"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from ddpnb.history.comparison import Comparison
from ddpnb.history.metrics import (
    StepSplit,
    efficiency_of,
    first_reached,
    num_diverged,
    smoothed,
    smoothed_loss,
    step_split,
    tenths,
)
from ddpnb.history.model import RunSnapshot, Status, ending
from ddpnb.history.stability import stability_notes
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.memory import Memory
from ddpnb.protocol.messages import Evaluation, Mark, MarkKind, RunReport
from ddpnb.protocol.notation import Target, parse_kill

StalenessCounts = NDArray[np.int64]
"""How many updates had staleness 0, 1, 2 ..."""

SHORT_SECONDS = 4.0
"""A run's speed is not measured well in less."""

StrategyKey = tuple[str, str]
"""Comparison and name, which the repeats of one strategy have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number and its range."""

    middle: float = math.nan
    """Median over repeats; with one repeat, the value of the run as a whole."""
    low: float = math.nan
    high: float = math.nan
    over: str = ""
    """``"repeats"``, ``"tenths"`` of the only run, or ``""`` if there is no range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySummary:
    """The repeats of one strategy in one comparison."""

    name: str
    comparison: str
    num_runs: int
    """Repeats that finished; as long as none has, all that began."""
    num_workers: int = 0
    """0 if not known."""
    status: Status
    samples_per_second: Spread = field(default_factory=Spread)
    rates: Mapping[int, float] = field(default_factory=dict)
    """Samples/s by repeat, where it is known."""
    speed_up: float = math.nan
    """Geometric mean, over the repeats, of samples/s over those of ``single`` in the same one."""
    efficiency: float = math.nan
    """Speed-up over number of devices: 1 is ideal.  Machine times share of the ceiling."""
    machine: float = math.nan
    """What the machine gives all devices at once: ``no-comm`` over devices times ``single``."""
    share_of_ceiling: float = math.nan
    """Geometric mean, over the repeats, of samples/s over those of ``no-comm``: what communication
    leaves."""
    split: StepSplit = field(default_factory=StepSplit)
    final_loss: Spread = field(default_factory=Spread)
    held_out_loss: Spread = field(default_factory=Spread)
    held_out_accuracy: Spread = field(default_factory=Spread)
    num_held_out: int = 0
    """Held-out samples that the model was evaluated on; 0 if not known."""
    held_out_metrics: Mapping[str, Spread] = field(default_factory=dict)
    """What the cell's own functions measured, by name."""
    last_metrics: Mapping[str, Spread] = field(default_factory=dict)
    """Where the curve of each further number ends that the steps measured."""
    bytes_received: float = math.nan
    """What one worker received in one step; NaN if nothing."""
    staleness_median: float = math.nan
    staleness_max: float = math.nan
    num_lost_samples: float = math.nan
    """Samples handed out without a gradient in return; NaN if there are none."""
    memory: Memory = field(default_factory=Memory)
    """Of the rank that holds most."""
    seconds_to_target: Spread = field(default_factory=Spread)
    """Until the target was reached: by the smoothed training loss, or on held-out samples."""
    samples_to_target: Spread = field(default_factory=Spread)
    samples_by_repeat: Mapping[int, float] = field(default_factory=dict)
    """The same by repeat, of those that reached it; empty where the target is an accuracy, which
    is known at a few moments alone."""
    num_missed_target: int = 0
    """Repeats that never reached it."""
    num_diverged: int = 0
    """Losses that were NaN or infinite."""
    sees_exposed: bool = True
    """Whether communication that holds up the computing can be distinguished from the rest."""
    uses_cores: bool = False
    """Whether its ranks communicate with the cores that they compute with."""
    is_computed: bool = False
    """Whether its times are those of emulated devices."""
    is_ceiling: bool = False
    """Whether it was added as the ceiling, for its speed alone."""
    is_emulated: bool = False
    """Whether it is emulated, so that its speed says nothing about the real strategy's."""
    has_even_shares: bool = True
    """Whether all workers train on equally many samples, as those of ``no-comm`` do."""
    is_short: bool = False
    """Whether a run was over before its speed could be measured."""
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=4)
def summarise(comparison: Comparison, target: Target | None = None) -> tuple[StrategySummary, ...]:
    """Return one summary for each strategy of each comparison among the runs.

    Figure, table, sentence and frames ask for it; the latest ones are computed once.

    Args:
        comparison: the runs.
        target: to reach, for ``seconds_to_target``; None: there is none.
    """
    groups = group_runs(comparison.runs)
    speeds = {key: _speed_of(_counted(runs)) for key, runs in groups.items()}
    rates = {key: by_repeat(_counted(runs), samples_per_second) for key, runs in groups.items()}
    settled = {  # nothing is measured against a run that still trains
        key: speeds[key].middle
        for key, runs in groups.items()
        if not any(run.is_running for run in _counted(runs))
    }
    return tuple(
        _summary(key, runs, speeds[key], rates, settled, target) for key, runs in groups.items()
    )


def group_runs(runs: Sequence[RunSnapshot]) -> dict[StrategyKey, list[RunSnapshot]]:
    """Return the repeats of each (comparison, name), in the order of their first run."""
    groups: dict[StrategyKey, list[RunSnapshot]] = {}
    for run in runs:
        groups.setdefault((run.comparison, run.name), []).append(run)
    return groups


def samples_per_second(run: RunSnapshot) -> float:
    """Return all samples over the training seconds of the slowest worker; NaN before any.

    The report of a worker may be missing, and so may its latest steps: whichever has more counts.
    Of a ceiling, where all workers train for the same time: as if each were as slow as the slowest.
    """
    workers = _workers_of(run)
    if workers and run.spec is not None and run.spec.is_ceiling:
        return len(workers) * min(report.num_samples / report.seconds for report in workers)
    in_reports = sum(report.num_samples for report in workers)
    samples = float(max(in_reports, run.aggregate.num_samples))
    seconds = training_seconds(run)
    return samples / seconds if seconds > 0 and samples > 0 else math.nan


def by_repeat(
    runs: Sequence[RunSnapshot], number_of: Callable[[RunSnapshot], float]
) -> Mapping[int, float]:
    """Return a number of each run by its repeat, where it is known and greater than 0.

    Runs that do not say which repeat they are, such as hand-written loops, count in their order.
    """
    repeats: Sequence[int] = [run.repeat for run in runs]
    if len(set(repeats)) < len(repeats):
        repeats = range(len(runs))
    numbers = {repeat: number_of(run) for repeat, run in zip(repeats, runs, strict=True)}
    return {repeat: number for repeat, number in numbers.items() if number > 0}


def log_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the logarithm of the ratio within each repeat in which both numbers are known."""
    return [math.log(ours[repeat] / theirs[repeat]) for repeat in ours if repeat in theirs]


def mean_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return the geometric mean of the ratios within each repeat; NaN if there are none."""
    logs = log_ratios(ours, theirs)
    return math.exp(fmean(logs)) if logs else math.nan


def bytes_received(runs: Sequence[RunSnapshot]) -> float:
    """Return what a worker received in a step, the mean over all; NaN if nothing."""
    reports = [report for run in runs for report in _workers_of(run)]
    num_bytes = sum(report.num_bytes_received for report in reports)
    return num_bytes / sum(report.num_steps for report in reports) if num_bytes else math.nan


def training_seconds(run: RunSnapshot) -> float:
    """Return the training seconds of the slowest worker, with what follows its last step."""
    return max((report.seconds for report in _workers_of(run)), default=run.aggregate.seconds)


def _workers_of(run: RunSnapshot) -> list[RunReport]:
    """Return the reports of the workers that have trained; none while the run trains."""
    reports = () if run.is_running else run.reports
    return [report for report in reports if report.took_part and report.num_samples > 0]


def staleness_counts(runs: Sequence[RunSnapshot]) -> StalenessCounts:
    """Return how many updates had staleness 0, 1, 2 ..., over all runs."""
    counts = np.zeros(
        max((len(run.aggregate.staleness) for run in runs), default=0), dtype=np.int64
    )
    for run in runs:
        counts[: len(run.aggregate.staleness)] += run.aggregate.staleness
    return counts


def staleness_median(counts: StalenessCounts) -> float:
    """Return the median staleness; NaN if no update has a staleness."""
    total = int(counts.sum())
    if total == 0:
        return math.nan
    upto = np.cumsum(counts)
    middle = np.searchsorted(upto, [(total - 1) // 2, total // 2], side="right")
    return float(middle.mean())


def reported(run: RunSnapshot, number_of: Callable[[RunReport], float]) -> float:
    """Return the first number in the ranks' reports that is not NaN; NaN if there is none."""
    values = [number_of(report) for report in run.reports]
    return next((value for value in values if not math.isnan(value)), math.nan)


def reported_metrics(run: RunSnapshot) -> Mapping[str, float]:
    """Return what the cell's own functions measured on held-out samples, by name."""
    return {name: value for each in run.reports for name, value in each.held_out_metrics.items()}


def last_metrics(run: RunSnapshot) -> Mapping[str, float]:
    """Return where the drawn line of each further number ends."""
    ends = {name: smoothed(curve) for name, curve in run.metric_curves.items()}
    known = {name: line[np.isfinite(line)] for name, line in ends.items()}
    return {name: float(line[-1]) for name, line in known.items() if len(line)}


def _spreads(found: Sequence[Mapping[str, float]]) -> Mapping[str, Spread]:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: spread([each.get(name, math.nan) for each in found]) for name in names}


def spread(values: Sequence[float], over: str = "repeats") -> Spread:
    """Return median and range of the values that are not NaN."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Spread()
    middle = float(np.median(known))
    if len(known) == 1:
        return Spread(middle=middle)
    return Spread(middle=middle, low=min(known), high=max(known), over=over)


def time_to_target(run: RunSnapshot, target: Target) -> tuple[float, float]:
    """Return the second and the sample at which a run first reached ``target``.

    That is where the smoothed training loss was as low, or, between two evaluations by linear
    interpolation, the held-out accuracy as high.
    """
    if target.is_accuracy:
        found = np.array(evaluations(run), dtype=np.float64).reshape(-1, len(Evaluation._fields))
        samples, seconds, _, accuracy = found.T
        falling, goal = -accuracy, -target.value
    else:
        curve, falling, goal = run.aggregate.curve, smoothed_loss(run), target.value
        seconds, samples = curve.seconds, curve.samples
    return first_reached(falling, seconds, goal), first_reached(falling, samples, goal)


def evaluations(run: RunSnapshot) -> tuple[Evaluation, ...]:
    """Return the held-out curve of a run, which ends with the trained model; empty if none."""
    found = next((report.evaluations for report in run.reports if report.evaluations), ())
    if not found or run.status is not Status.FINISHED:
        return found
    last = Evaluation(
        num_samples=run.aggregate.num_samples,
        seconds=max((report.seconds for report in run.reports if report.took_part), default=0.0),
        loss=reported(run, lambda report: report.held_out_loss),
        accuracy=reported(run, lambda report: report.held_out_accuracy),
    )
    return (*(each for each in found if each.num_samples < last.num_samples), last)


def _summary(
    key: StrategyKey,
    runs: Sequence[RunSnapshot],
    speed: Spread,
    rates: Mapping[StrategyKey, Mapping[int, float]],
    settled: Mapping[StrategyKey, float],
    target: Target | None,
) -> StrategySummary:
    comparison, name = key
    counted = _counted(runs)
    stale = staleness_counts(counted)
    num_workers = max(map(_num_workers, counted), default=0)
    aiming = [r for r in counted if target and (evaluations(r) or not target.is_accuracy)]
    found = {run.run_id: time_to_target(run, target) for run in aiming if target is not None}
    reached = list(found.values())
    samples: Mapping[int, float] = {}
    if target is not None and not target.is_accuracy:
        samples = by_repeat(counted, lambda run: found[run.run_id][1])
    single, ceiling = (
        rates[other] if (other := (comparison, each)) in settled else {}
        for each in (BASELINE, CEILING)
    )
    devices = max(map(num_devices, counted), default=0)
    speed_up = mean_ratio(rates[key], single)
    shares = efficiency_of(
        mean_ratio(rates[key], ceiling),
        mean_ratio(ceiling, single),
        0 if name == BASELINE else devices,
    )
    headers = [run.header for run in counted if run.header is not None]
    is_computed = any(run.spec is not None and run.spec.is_emulated for run in counted)
    return StrategySummary(
        name=name,
        comparison=comparison,
        num_runs=len(counted),
        num_workers=num_workers,
        status=counted[-1].status,
        samples_per_second=speed,
        rates=rates[key],
        speed_up=speed_up,
        efficiency=speed_up / devices if devices else math.nan,
        machine=shares.machine,
        share_of_ceiling=shares.communication,
        split=step_split(counted),
        final_loss=spread([reported(run, lambda r: r.final_loss) for run in counted]),
        held_out_loss=spread([reported(run, lambda r: r.held_out_loss) for run in counted]),
        held_out_accuracy=spread([reported(run, lambda r: r.held_out_accuracy) for run in counted]),
        num_held_out=max((r.num_held_out for run in counted for r in run.reports), default=0),
        held_out_metrics=_spreads([reported_metrics(run) for run in counted]),
        last_metrics=_spreads([last_metrics(run) for run in counted]),
        bytes_received=bytes_received(counted),
        staleness_median=staleness_median(stale),
        staleness_max=float(len(stale) - 1) if len(stale) else math.nan,
        num_lost_samples=_greatest(counted, lambda report: report.num_lost_samples),
        memory=memory_of(counted),
        seconds_to_target=spread([seconds for seconds, _ in reached]),
        samples_to_target=spread([samples for _, samples in reached]),
        samples_by_repeat=samples,
        num_missed_target=sum(math.isnan(seconds) for seconds, _ in reached),
        num_diverged=sum(num_diverged(run) for run in runs),
        sees_exposed=all(header.sees_exposed for header in headers),
        uses_cores=any(header.device == "cpu" for header in headers) and not is_computed,
        is_computed=is_computed,
        is_ceiling=any(run.spec is not None and run.spec.is_ceiling for run in counted),
        is_emulated=is_emulated(runs),
        has_even_shares=all(header.synchronous for header in headers),
        is_short=not is_computed and any(map(_is_short, runs)),
        notes=_notes(runs) + stability_notes(counted, staleness_median(stale)),
    )


def memory_of(runs: Sequence[RunSnapshot]) -> Memory:
    """Return what the rank that holds most holds; all 0 before there is a report."""
    held = (report.memory for run in runs for report in run.reports)
    return max(held, key=lambda memory: memory.total, default=Memory())


def is_emulated(runs: Sequence[RunSnapshot]) -> bool:
    """Return whether the strategy itself is emulated where these runs were trained."""
    return any(run.header is not None and run.header.is_emulated for run in runs)


def _num_workers(run: RunSnapshot) -> int:
    """Return how many ranks train, or have logged from a hand-written loop; 0 if not known."""
    if run.header is not None:
        return run.header.num_workers
    return len(run.aggregate.ranks) if run.spec is None else 0


def num_devices(run: RunSnapshot) -> int:
    """Return over how many devices the speed-up is divided: GPUs that are shared count once."""
    return (run.header.num_devices if run.header is not None else 0) or _num_workers(run)


def _greatest(runs: Sequence[RunSnapshot], number_of: Callable[[RunReport], int]) -> float:
    """Return the greatest number in any rank's report; NaN if all are 0."""
    return float(max((number_of(report) for run in runs for report in run.reports), default=0)) or (
        math.nan
    )


def _counted(runs: Sequence[RunSnapshot]) -> list[RunSnapshot]:
    """Return the runs that finished, if any did; a failed repeat must not bend a median."""
    return [run for run in runs if run.status is Status.FINISHED] or list(runs)


def _speed_of(runs: Sequence[RunSnapshot]) -> Spread:
    """Return samples/s over repeats, or over the tenths of the only run."""
    if len(runs) > 1:
        return spread([samples_per_second(run) for run in runs])
    parts = tenths(runs[0].aggregate.curve)
    whole = samples_per_second(runs[0])
    if len(parts) == 0 or math.isnan(whole):
        return Spread(middle=whole)
    return Spread(middle=whole, low=float(parts.min()), high=float(parts.max()), over="tenths")


def _notes(runs: Sequence[RunSnapshot]) -> tuple[str, ...]:
    """Return each note once: on emulation, faults, and what is missing."""
    notes = [note for run in runs if run.header for note in run.header.notes]
    for run in runs:
        if run.status in (Status.FAILED, Status.STOPPED) or run.detail:
            notes.append(ending(run.status, run.detail))
    diverged = sum(num_diverged(run) for run in runs)
    lost = sum(run.num_lost_batches for run in runs)
    notes += [_described(mark, run) for run in runs for mark in run.marks if mark.seconds > 0]
    notes += [note for run in runs for note in _faults_too_late(run)]
    if diverged:
        notes.append(f"{diverged} {'loss was' if diverged == 1 else 'losses were'} NaN or infinite")
    if lost:
        notes.append(f"{lost} batch{'es' if lost > 1 else ''} of events never arrived")
    return tuple(dict.fromkeys(notes))


def _is_short(run: RunSnapshot) -> bool:
    """Return whether a run was over before its speed could be measured."""
    is_over = run.status is Status.FINISHED and run.spec is not None
    return is_over and 0 < training_seconds(run) < SHORT_SECONDS


def _described(mark: Mark, run: RunSnapshot) -> str:
    """Return the note for something that happened during the run."""
    text = f"rank {mark.rank} {mark.text} at {mark.seconds:.1f} s"
    is_death = mark.kind in (MarkKind.KILLED, MarkKind.DIED)
    on_purpose = () if run.spec is None else run.spec.kill
    if is_death and not any(kill.startswith(f"{mark.rank}@") for kill in on_purpose):
        return f"{text}; its steps of the last half second before may be missing"
    return text


def _faults_too_late(run: RunSnapshot) -> list[str]:
    """Return a note for each rank that was to be killed after the training had ended."""
    if run.status is not Status.FINISHED or run.spec is None or run.header is None:
        return []
    killed = {mark.rank for mark in run.marks if mark.kind is MarkKind.KILLED}
    with contextlib.suppress(UserError):  # a stored fault may be one that is refused by now
        return [
            f"rank {kill.rank} was not killed: it began no step after {kill.seconds:g} s"
            for kill in map(parse_kill, run.spec.kill)
            if kill.rank < run.header.num_workers and kill.rank not in killed
        ]
    return []
