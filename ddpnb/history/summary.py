"""Every number of the final table, strategy by strategy.  (Kernel.)

Speeds, losses over time and parts of a step follow from the steps of the runs; scores and the
final loss from their evaluations; bytes received, memory and lost samples from the ranks' counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from statistics import fmean, geometric_mean

import numpy as np
from numpy.typing import NDArray

from ddpnb.history.comparison import Comparison
from ddpnb.history.curve import curve_of, end_of, first_reached, smoothed, tenths
from ddpnb.history.model import RunSnapshot, Status, StepSplit, step_split
from ddpnb.history.notes import notes_of
from ddpnb.history.rows import metrics_of
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.messages import Evaluation, Memory
from ddpnb.protocol.notation import Target

SHORT_SECONDS = 4.0
"""A run's speed is not measured well in less."""

StrategyKey = tuple[str, str]
"""Comparison and name, which the repeats of one strategy have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number and its range."""

    middle: float = math.nan
    """Median over repeats, of samples/s the geometric mean."""
    low: float = math.nan
    """The range over repeats; NaN of one alone."""
    high: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySummary:
    """The repeats of one strategy in one comparison."""

    name: str
    comparison: str
    label: str
    """Its name, with that of its comparison where there are several; says if it is emulated."""
    runs: tuple[RunSnapshot, ...]
    """All its repeats."""
    num_runs: int
    """Repeats that finished; as long as none has, all that began."""
    num_workers: int
    """0 if not known."""
    status: Status
    samples_per_second: Spread
    rates: Mapping[int, float]
    """Samples/s by repeat, where it is known."""
    tenths: tuple[float, ...]
    """Samples/s in each tenth of the only run; empty of several repeats."""
    ideal: float
    """Samples/s of as many devices, each as fast as ``single``."""
    ceiling: float
    """Samples/s of ``no-comm``."""
    speed_up: float
    """Samples/s over those of ``single``."""
    efficiency: float
    """Samples/s over ``ideal``; ``machine`` times ``share_of_ceiling``."""
    machine: float
    """What the machine gives all devices at once: ``ceiling`` over ``ideal``."""
    share_of_ceiling: float
    """What communication leaves: samples/s over ``ceiling``."""
    split: StepSplit
    scores: Mapping[str, Spread]
    """What was measured of the models, by the titles of columns; see ``_scores``."""
    num_held_out: int
    """Held-out samples that the model was evaluated on; 0 if not known."""
    bytes_received: float
    """What one worker received in one step; NaN if nothing."""
    staleness_median: float
    staleness_max: float
    num_lost_samples: int
    """Samples handed out without a gradient in return."""
    memory: Memory
    """Of the rank that holds most; all 0 before there is a report."""
    seconds_to_target: Spread
    """Until the target was reached, by the smoothed training loss or on held-out samples; infinite
    where a repeat never reached it."""
    samples_to_target: Spread
    num_missed_target: int
    """Repeats that never reached it."""
    num_diverged: int
    """Losses that were NaN or infinite."""
    sees_exposed: bool
    """Whether communication that holds up the computing can be distinguished from the rest."""
    is_computed: bool
    """Whether its times are those of emulated devices."""
    is_ceiling: bool
    """Whether it was added as the ceiling, for its speed alone."""
    is_emulated: bool
    """Whether it is emulated, so that its speed says nothing about the real strategy's."""
    is_short: bool
    """Whether a run was over before its speed could be measured."""
    notes: tuple[str, ...]

    @property
    def key(self) -> StrategyKey:
        """What its repeats have in common."""
        return (self.comparison, self.name)


@lru_cache(maxsize=4)
def summarise(comparison: Comparison, target: Target | None = None) -> tuple[StrategySummary, ...]:
    """Return one summary for each strategy of each comparison among the runs.

    Figure, table, sentence and frames ask for it; the latest ones are computed once.

    Args:
        comparison: the runs.
        target: to reach, for ``seconds_to_target``; None: there is none.
    """
    groups = group_runs(comparison.runs)
    rates = {key: by_repeat(_counted(runs), samples_per_second) for key, runs in groups.items()}
    levels, linked = _levels(rates)
    settled = {  # nothing is measured against a run that still trains
        key: levels[key]
        for key in linked
        if not any(run.is_running for run in _counted(groups[key]))
    }
    several = len({comparison for comparison, _ in groups}) > 1
    return tuple(
        _summary(
            key, runs, rates[key], levels[key], settled if key in linked else {}, target, several
        )
        for key, runs in groups.items()
    )


def _levels(
    rates: Mapping[StrategyKey, Mapping[int, float]],
) -> tuple[dict[StrategyKey, float], set[StrategyKey]]:
    """Return the samples/s of each strategy, and which may be divided by each other.

    They are geometric means over the repeats.  Where a strategy lacks some of those that ``single``
    has, its mean would be of other conditions: it gets that of ``single`` times the mean of the
    ratios within the repeats that both have.  So the ratio of any two is what was measured.
    """
    levels: dict[StrategyKey, float] = {}
    linked = set()
    for key, own in rates.items():
        first = next(other for other in rates if other[0] == key[0])
        theirs = rates.get((key[0], BASELINE)) or rates[first]
        levels[key] = geometric_mean(own.values()) if own else math.nan
        if logs := log_ratios(own, theirs):
            levels[key] = geometric_mean(theirs.values()) * math.exp(fmean(logs))
            linked.add(key)
    return levels, linked


def group_runs(runs: Sequence[RunSnapshot]) -> dict[StrategyKey, list[RunSnapshot]]:
    """Return the repeats of each (comparison, name), in the order of their first run."""
    groups: dict[StrategyKey, list[RunSnapshot]] = {}
    for run in runs:
        groups.setdefault((run.comparison, run.name), []).append(run)
    return groups


def samples_per_second(run: RunSnapshot) -> float:
    """Return all samples over the training seconds of the slowest worker; NaN before any.

    Of a ceiling, where all workers train for the same time: as if each were as slow as the slowest.
    """
    if run.is_ceiling and not run.is_running and (workers := [r for r in run.ranks if r.seconds]):
        return len(workers) * min(rank.num_samples / rank.seconds for rank in workers)
    return run.num_samples / run.seconds if run.seconds > 0 and run.num_samples else math.nan


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


def staleness_counts(runs: Sequence[RunSnapshot]) -> NDArray[np.int64]:
    """Return how many updates had staleness 0, 1, 2 ..., over all runs."""
    counts = zip_longest(*(run.staleness for run in runs), fillvalue=0)
    return np.array([sum(each) for each in counts], dtype=np.int64)


def reported_metrics(run: RunSnapshot) -> Mapping[str, float]:
    """Return what the cell's own functions measured on held-out samples, by name."""
    return {name: value for each in run.reports for name, value in each.held_out_metrics.items()}


def spread(values: Sequence[float], middle: float | None = None) -> Spread:
    """Return the range over repeats of what is not NaN, around its median or another middle."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Spread()
    middle = float(np.median(known)) if middle is None else middle
    if len(known) == 1:
        return Spread(middle=middle)
    return Spread(middle=middle, low=min(known), high=max(known))


def time_to_target(run: RunSnapshot, target: Target) -> tuple[float, float]:
    """Return the second and the sample at which a run first reached ``target``; NaN if it has not.

    That is where the smoothed training loss was as low, or, between two evaluations by linear
    interpolation, the held-out accuracy as high.
    """
    if target.is_accuracy:
        found = np.array(evaluations(run), dtype=np.float64).reshape(-1, len(Evaluation._fields))
        samples, seconds, _, accuracy = found.T
        falling, goal = -accuracy, -target.value
    else:
        falling, goal = smoothed(run.curve), target.value
        seconds, samples = run.curve.seconds, run.curve.samples
    return first_reached(falling, seconds, goal), first_reached(falling, samples, goal)


def evaluations(run: RunSnapshot) -> tuple[Evaluation, ...]:
    """Return the held-out curve of a run, which ends with the trained model; empty if none."""
    found = next((report.evaluations for report in run.reports if report.evaluations), ())
    if not found or run.status is not Status.FINISHED:
        return found
    before = tuple(each for each in found if each.num_samples < run.num_samples)
    return before + trained_model(run)


def trained_model(run: RunSnapshot) -> tuple[Evaluation, ...]:
    """Return the evaluation of the trained model; empty if there is none."""
    last = Evaluation(
        num_samples=run.num_samples,
        seconds=run.seconds,
        loss=run.reported("held_out_loss"),
        accuracy=run.reported("held_out_accuracy"),
    )
    is_judged = any(report.num_held_out for report in run.reports) or not math.isnan(last.loss)
    return (last,) if is_judged else ()


def _summary(
    key: StrategyKey,
    runs: Sequence[RunSnapshot],
    rates: Mapping[int, float],
    level: float,
    settled: Mapping[StrategyKey, float],
    target: Target | None,
    is_one_of_several: bool,
) -> StrategySummary:
    comparison, name = key
    counted = _counted(runs)
    is_emulated = any(run.header is not None and run.header.is_emulated for run in runs)
    label = f"{comparison}/{name}" if is_one_of_several and comparison not in ("", name) else name
    stale = staleness_counts(counted)
    median = float(np.median(np.repeat(np.arange(len(stale)), stale))) if stale.any() else math.nan
    reached = [] if target is None else _reached(counted, target)
    single, ceiling = (settled.get((comparison, each), math.nan) for each in (BASELINE, CEILING))
    devices = max(map(num_devices, counted), default=0)
    ideal = devices * single if devices else math.nan
    reports = [report for run in counted for report in run.reports]
    num_steps = sum(report.num_steps for report in reports)
    received = sum(report.num_bytes_received for report in reports)
    headers = [run.header for run in counted if run.header is not None]
    scores = [_scores(run) for run in counted]
    is_computed = any(run.spec is not None and run.spec.is_emulated for run in counted)
    return StrategySummary(
        name=name,
        comparison=comparison,
        label=f"{label} (emulated)" if is_emulated else label,
        runs=tuple(runs),
        num_runs=len(counted),
        num_workers=max(map(_num_workers, counted), default=0),
        status=counted[-1].status,
        samples_per_second=spread(list(rates.values()), middle=level),
        rates=rates,
        tenths=tuple(tenths(counted[0].curve)) if len(counted) == 1 else (),
        ideal=ideal,
        ceiling=ceiling,
        speed_up=level / single,
        efficiency=level / ideal,
        machine=math.nan if name == BASELINE else ceiling / ideal,
        share_of_ceiling=math.nan if name == BASELINE else level / ceiling,
        split=step_split(counted),
        scores={
            name: spread([each.get(name, math.nan) for each in scores])
            for name in dict.fromkeys(chain(*scores))
        },
        num_held_out=max((report.num_held_out for report in reports), default=0),
        bytes_received=received / num_steps if received else math.nan,
        staleness_median=median,
        staleness_max=float(len(stale) - 1) if len(stale) else math.nan,
        num_lost_samples=max((report.num_lost_samples for report in reports), default=0),
        memory=max((r.memory for r in reports), key=lambda m: m.total, default=Memory()),
        seconds_to_target=spread([seconds for seconds, _ in reached]),
        samples_to_target=spread([samples for _, samples in reached]),
        num_missed_target=sum(math.isinf(seconds) for seconds, _ in reached),
        num_diverged=sum(run.num_diverged for run in runs),
        sees_exposed=all(header.sees_exposed for header in headers),
        is_computed=is_computed,
        is_ceiling=any(run.is_ceiling for run in counted),
        is_emulated=is_emulated,
        is_short=not is_computed
        and any(
            run.status is Status.FINISHED and run.spec and 0 < run.seconds < SHORT_SECONDS
            for run in runs
        ),
        notes=notes_of(runs, counted, median),
    )


def _scores(run: RunSnapshot) -> dict[str, float]:
    """Return what the evaluations say, and where the curve of each further number ends."""
    lasts = {
        f"last {name}": end_of(curve_of(run.events, run.header, field))
        for name, field in metrics_of(run.events).items()
    }
    return {
        "final loss": run.reported("final_loss"),
        "held-out loss": run.reported("held_out_loss"),
        "held-out accuracy": run.reported("held_out_accuracy"),
        **{f"held-out {name}": value for name, value in reported_metrics(run).items()},
        **lasts,
    }


def _reached(runs: Sequence[RunSnapshot], target: Target) -> list[tuple[float, float]]:
    """Return when each run reached the target; infinity where one that finished never did."""
    found = []
    for run in runs:
        if evaluations(run) or not target.is_accuracy:
            never = math.inf if run.status is Status.FINISHED else math.nan
            seconds, samples = time_to_target(run, target)
            found.append((never, never) if math.isnan(seconds) else (seconds, samples))
    return found


def _num_workers(run: RunSnapshot) -> int:
    """Return how many ranks train, or have logged from a hand-written loop; 0 if not known."""
    if run.header is not None:
        return run.header.num_workers
    return len(run.ranks) if run.spec is None else 0


def num_devices(run: RunSnapshot) -> int:
    """Return over how many devices the speed-up is divided: GPUs that are shared count once."""
    return (run.header.num_devices if run.header is not None else 0) or _num_workers(run)


def _counted(runs: Sequence[RunSnapshot]) -> list[RunSnapshot]:
    """Return the runs that finished, if any did; a failed repeat must not bend a mean."""
    return [run for run in runs if run.status is Status.FINISHED] or list(runs)
