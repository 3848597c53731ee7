"""Computes every number of the final table for each strategy.  Runs in the kernel.

Speeds, losses over time and parts of a step are computed from the steps of the runs.  Scores and
the final loss come from evaluations.  The ranks report bytes received, memory and lost samples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from statistics import fmean, geometric_mean

import numpy as np
from numpy.typing import NDArray

from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.messages import Evaluation, Memory
from ddpnb.protocol.notation import Target
from ddpnb.results.comparison import Comparison
from ddpnb.results.curve import curve_of, end_of, first_reached, smoothed, tenths
from ddpnb.results.model import RunSnapshot, Status, StepSplit, step_split
from ddpnb.results.notes import notes_of
from ddpnb.results.rows import metrics_of

SHORT_SECONDS = 4.0
"""Minimum training seconds to measure a strategy's speed reliably."""

StrategyKey = tuple[str, str]
"""The name of the comparison and the name of the strategy.  All repeats share both names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A value and its range over the repeats."""

    middle: float = math.nan
    """The median over the repeats; for samples/s, the geometric mean."""
    low: float = math.nan
    """The lower end of the range over repeats; NaN if there is only one repeat."""
    high: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySummary:
    """The repeats of one strategy in one comparison."""

    name: str
    comparison: str
    label: str
    """The name to show; if needed, with the comparison's name or with "(emulated)"."""
    runs: tuple[RunSnapshot, ...]
    """All repeats."""
    num_runs: int
    """Number of finished repeats; if no repeat has finished, number of repeats that have begun."""
    num_workers: int
    """Number of workers; 0 if unknown."""
    status: Status
    samples_per_second: Spread
    rates: Mapping[int, float]
    """The samples/s of each repeat.  Repeats without a known speed are missing."""
    tenths: tuple[float, ...]
    """Samples/s in each tenth of the only run; empty if there are several repeats."""
    ideal: float
    """Samples/s of all devices together, if each device were as fast as ``single``."""
    ceiling: float
    """Samples/s of ``no-comm``."""
    speed_up: float
    """Samples/s, divided by the samples/s of ``single``."""
    efficiency: float
    """Samples/s, divided by ``ideal``; equals ``machine`` times ``share_of_ceiling``."""
    machine: float
    """``ceiling``, divided by ``ideal``: the efficiency without communication."""
    share_of_ceiling: float
    """Samples/s, divided by ``ceiling``: the share of the ceiling that the strategy reaches."""
    split: StepSplit
    scores: Mapping[str, Spread]
    """Scores of the trained models, by the title of the column; see ``_scores``."""
    num_held_out: int
    """Number of held-out samples in the model's evaluation; 0 if unknown."""
    bytes_received: float
    """Bytes that one worker received in one step; NaN if zero."""
    staleness_median: float
    staleness_max: float
    num_lost_samples: int
    """Number of samples for which no worker returned a gradient."""
    memory: Memory
    """Memory of the rank with the largest total; all values are 0 before the first report."""
    seconds_to_target: Spread
    """Seconds until the smoothed training loss, or the held-out accuracy, reached the target.
    Infinite if a repeat never reached the target."""
    samples_to_target: Spread
    num_missed_target: int
    """Number of repeats that never reached the target."""
    num_diverged: int
    """Number of losses that were NaN or infinite."""
    sees_exposed: bool
    """True if exposed communication can be measured separately."""
    is_computed: bool
    """True if the times are computed for emulated devices."""
    is_ceiling: bool
    """True if ddpnb added the strategy only to measure the ceiling."""
    is_emulated: bool
    """True if the strategy is emulated.  Its speed is then not the real strategy's speed."""
    is_short: bool
    """True if a run ended before its speed could be measured reliably."""
    notes: tuple[str, ...]

    @property
    def key(self) -> StrategyKey:
        """The comparison's name and the strategy's name."""
        return (self.comparison, self.name)


@lru_cache(maxsize=4)
def summarise(comparison: Comparison, target: Target | None = None) -> tuple[StrategySummary, ...]:
    """Return one summary for each strategy of each comparison among the runs.

    The latest summaries are cached, because figure, table, sentence and frames all need them.

    Args:
        comparison: the comparison with the runs.
        target: the target for ``seconds_to_target``; None if there is no target.
    """
    groups = group_runs(comparison.runs)
    rates = {key: by_repeat(_counted(runs), samples_per_second) for key, runs in groups.items()}
    levels, linked = _levels(rates)
    settled = {  # a run that still trains cannot be the reference of other runs
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
    """Return each strategy's samples/s, and the strategies with comparable samples/s.

    Samples/s are geometric means over repeats.  If a strategy lacks repeats that ``single`` has,
    the means are not comparable.  Then the strategy's value is the mean of ``single``, multiplied
    by the mean ratio over the repeats that both have.  So the speed-up equals the measured ratio.
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
    """Map each (comparison, name) to its repeats, in the order of the first runs."""
    groups: dict[StrategyKey, list[RunSnapshot]] = {}
    for run in runs:
        groups.setdefault((run.comparison, run.name), []).append(run)
    return groups


def samples_per_second(run: RunSnapshot) -> float:
    """Return the number of samples, divided by the slowest worker's seconds; NaN if unknown.

    For a ceiling, all workers train for the same time.  Each worker counts as fast as the slowest.
    """
    if run.is_ceiling and not run.is_running and (workers := [r for r in run.ranks if r.seconds]):
        return len(workers) * min(rank.num_samples / rank.seconds for rank in workers)
    return run.num_samples / run.seconds if run.seconds > 0 and run.num_samples else math.nan


def by_repeat(
    runs: Sequence[RunSnapshot], number_of: Callable[[RunSnapshot], float]
) -> Mapping[int, float]:
    """Return a dict that maps each run's repeat to ``number_of(run)``, if this value is above 0.

    If runs share a repeat number, as hand-written loops do, the runs are numbered in order.
    """
    repeats: Sequence[int] = [run.repeat for run in runs]
    if len(set(repeats)) < len(repeats):
        repeats = range(len(runs))
    numbers = {repeat: number_of(run) for repeat, run in zip(repeats, runs, strict=True)}
    return {repeat: number for repeat, number in numbers.items() if number > 0}


def log_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the logarithm of the ratio for each repeat in which both numbers are known."""
    return [math.log(ours[repeat] / theirs[repeat]) for repeat in ours if repeat in theirs]


def staleness_counts(runs: Sequence[RunSnapshot]) -> NDArray[np.int64]:
    """Return the numbers of updates with staleness 0, 1, 2 ... in all runs together."""
    counts = zip_longest(*(run.staleness for run in runs), fillvalue=0)
    return np.array([sum(each) for each in counts], dtype=np.int64)


def reported_metrics(run: RunSnapshot) -> Mapping[str, float]:
    """Return the held-out values of the cell's ``metric`` function, by name."""
    return {name: value for each in run.reports for name, value in each.held_out_metrics.items()}


def spread(values: Sequence[float], middle: float | None = None) -> Spread:
    """Return the ``Spread`` of the values that are not NaN.  ``middle`` defaults to the median."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Spread()
    middle = float(np.median(known)) if middle is None else middle
    if len(known) == 1:
        return Spread(middle=middle)
    return Spread(middle=middle, low=min(known), high=max(known))


def time_to_target(run: RunSnapshot, target: Target) -> tuple[float, float]:
    """Return the seconds and samples until a run first reached ``target``; NaN if it never did.

    The smoothed training loss must fall to the target, or the held-out accuracy must rise to it.
    Between two evaluations, the accuracy is interpolated linearly.
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
    """Return a run's held-out evaluations, if any.  The last evaluation is of the trained model."""
    found = next((report.evaluations for report in run.reports if report.evaluations), ())
    if not found or run.status is not Status.FINISHED:
        return found
    before = tuple(each for each in found if each.num_samples < run.num_samples)
    return before + trained_model(run)


def trained_model(run: RunSnapshot) -> tuple[Evaluation, ...]:
    """Return the evaluation of the trained model; empty if the model was not evaluated."""
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
    """Return the scores of the evaluations, and the last value of each logged number's curve."""
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
    """Return the seconds and samples until each run reached the target; infinity if never."""
    found = []
    for run in runs:
        if evaluations(run) or not target.is_accuracy:
            never = math.inf if run.status is Status.FINISHED else math.nan
            seconds, samples = time_to_target(run, target)
            found.append((never, never) if math.isnan(seconds) else (seconds, samples))
    return found


def _num_workers(run: RunSnapshot) -> int:
    """Return the number of workers, or of ranks with a hand-written loop; 0 if unknown."""
    if run.header is not None:
        return run.header.num_workers
    return len(run.ranks) if run.spec is None else 0


def num_devices(run: RunSnapshot) -> int:
    """Return the number of devices for the efficiency.  A GPU of several ranks counts once."""
    return (run.header.num_devices if run.header is not None else 0) or _num_workers(run)


def _counted(runs: Sequence[RunSnapshot]) -> list[RunSnapshot]:
    """Return the finished runs; return all runs if no run finished.  Means exclude failed runs."""
    return [run for run in runs if run.status is Status.FINISHED] or list(runs)
