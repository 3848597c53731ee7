"""The findings of a comparison: a table with one row per strategy, and one sentence (kernel).

Where the ranges of two speeds overlap, the sentence says nothing about which is faster.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.history.summary import Spread, StrategySummary, summarise
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.reports.formatting import (
    NOTHING,
    labels,
    listed,
    notes,
    number,
    percent,
    short,
    size,
    styles,
    title,
)
from ddpnb.reports.table import Cell, Column, Table

RANGES = {
    "repeats": "samples/s: median and range over the repeats",
    "tenths": "samples/s: mean of the run, and range over its tenths",
}
"""The note that explains a range, by what the range is over."""


def results_table(comparison: Comparison, target: float | None = None) -> Table:
    """Return one row per strategy, without the columns that hold no information.

    Args:
        comparison: the runs.
        target: a training loss; a column shows when it was reached.  None: no such column.
    """
    summaries = summarise(comparison, target)
    names = labels(comparison)
    look = styles(comparison)
    heads = tuple(
        Cell(text=names[key], quiet=_state(s), dot=look[key].colour, is_hollow=look[key].is_hollow)
        for s in summaries
        for key in [(s.comparison, s.name)]
    )
    columns = [(Column(title="strategy"), heads)]
    is_classified = any(math.isfinite(s.held_out_accuracy.middle) for s in summaries)
    for name, cell_of in _columns_of(summaries).items():
        cells = tuple(map(cell_of, summaries))
        is_redundant = is_classified and name == "held-out loss"  # still in to_frame()
        is_redundant |= name == "workers" and not _workers_differ(summaries)
        is_redundant |= name == "received per step" and all(map(_receives_as_it_sends, summaries))
        is_redundant |= name in ONLY_DIFFERENCES and len({cell.text for cell in cells}) == 1
        if not is_redundant and any(cell.text != NOTHING for cell in cells):
            columns.append((Column(title=name, is_number=True), cells))
        if name == "samples/s" and target is not None:
            reached = tuple(_target_cell(summary) for summary in summaries)
            columns.append((Column(title=f"to loss {target:g}", is_number=True), reached))
    return Table(
        caption=title(comparison),
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        notes=_column_notes(summaries, [column.title for column, _ in columns])
        + notes(comparison, summaries),
    )


def sentence(comparison: Comparison, target: float | None = None) -> str:
    """Return one sentence on speed, scores and failures, as far as they are known.

    Args:
        comparison: the runs.
        target: a training loss; the sentence says when it was reached.  None: no such loss.
    """
    summaries = summarise(comparison, target)
    names = labels(comparison)
    called = {id(summary): names[summary.comparison, summary.name] for summary in summaries}
    done = [s for s in summaries if s.status is Status.FINISHED and not s.is_ceiling]
    parts = [
        _speeds([s for s in done if not s.is_emulated], called),
        "" if target is None else _reached(done, called, target),
        *_scores(done, called),
        *(_failures(summary, called[id(summary)]) for summary in summaries),
        *(
            f"{called[id(s)]} says nothing about the speed of the real one"
            for s in done
            if s.is_emulated
        ),
    ]
    text = "; ".join(part for part in parts if part) or _alone(done, called)
    if not text:
        return "Nothing has finished yet."
    is_name = text.startswith(tuple(called.values()))  # names keep their lower case
    return f"{text if is_name else text[0].upper() + text[1:]}."


def _workers_differ(summaries: Sequence[StrategySummary]) -> bool:
    """Return whether strategies other than the baseline differ in their number of workers."""
    return len({s.num_workers for s in summaries if s.num_workers and s.name != BASELINE}) > 1


def _column_notes(summaries: Sequence[StrategySummary], shown: Sequence[str]) -> tuple[str, ...]:
    overs = dict.fromkeys(s.samples_per_second.over for s in summaries)
    is_stale = any(math.isfinite(s.staleness_max) for s in summaries)
    found = [RANGES[over] for over in overs if over]
    found += ["staleness: median / maximum"] if is_stale else []
    if "machine" in shown and "communication" in shown:
        found.append(
            "efficiency = machine × communication: no-comm over workers × single, "
            "and the strategy over no-comm"
        )
    if any(s.is_emulated for s in summaries):
        found.append(
            "in brackets: copies in shared memory, no PCIe, no devices; "
            "the real one's speed may be quite another"
        )
    if any(s.split.parts.hidden > 0 and s.is_on_cpu for s in summaries):
        found.append("communication hidden on a CPU still takes a core's time")
    if "exposed" in shown and any(s.split.exposed_share > 0 for s in summaries):
        found.append(
            "exposed: share of a step in which a rank exchanges tensors or waits for other ranks, "
            "and computes nothing"
        )
    if "memory per rank" in shown:
        found.append("memory per rank: parameters and optimizer state, then the state alone")
    return tuple(found)


def _state(summary: StrategySummary) -> str:
    state = "" if summary.status is Status.FINISHED else summary.status.value
    repeats = f"{summary.num_runs} repeats" if summary.num_runs > 1 else ""
    return ", ".join(part for part in (repeats, state) if part)


def _speed_cell(summary: StrategySummary) -> Cell:
    speed = summary.samples_per_second
    middle = _judged(summary, number(speed.middle))
    return middle if math.isnan(speed.low) else replace(middle, quiet=_range(speed, number))


def _judged(summary: StrategySummary, text: str) -> Cell:
    """Return a number that depends on speed: in brackets, where that of the real one differs."""
    return Cell(text=f"({text})" if summary.is_emulated and text != NOTHING else text)


def _of(spread: Spread, shown: Callable[[float], str] = number) -> Cell:
    if math.isnan(spread.low) or shown(spread.low) == shown(spread.high):
        return Cell(text=shown(spread.middle))
    return Cell(text=shown(spread.middle), quiet=_range(spread, shown))


def _range(spread: Spread, shown: Callable[[float], str]) -> str:
    """Return e.g. ``96.1–97.2 %``, with the unit once."""
    low, high = shown(spread.low), shown(spread.high)
    return f"{low.removesuffix(' %')}–{high}" if spread.low >= 0 else f"{low} to {high}"


def _exposed(summary: StrategySummary) -> Cell:
    parts = summary.split.parts
    is_timed = parts.communication + parts.waiting + parts.hidden > 0 or summary.name == CEILING
    is_known = is_timed and summary.num_workers > 1 and summary.sees_exposed
    return Cell(text=percent(summary.split.exposed_share) if is_known else NOTHING)


def _memory(summary: StrategySummary) -> Cell:
    parameters, state = summary.parameter_bytes, summary.optimizer_bytes
    if math.isnan(parameters) and math.isnan(state):
        return Cell(text=NOTHING)
    both = sum(part for part in (parameters, state) if math.isfinite(part))
    return Cell(text=size(both), quiet=f"{size(state)} state" if state > 0 else "")


def _receives_as_it_sends(summary: StrategySummary) -> bool:
    sent, received = summary.split.num_bytes_sent, summary.bytes_received
    return size(sent) == size(received) or math.isnan(received)


def _target_cell(summary: StrategySummary) -> Cell:
    """Return the seconds and samples after which the target was reached."""
    seconds, samples = summary.seconds_to_target.middle, summary.samples_to_target.middle
    if summary.is_ceiling:
        return Cell(text=NOTHING)
    if math.isnan(seconds):
        return Cell(text="never" if summary.status is Status.FINISHED else NOTHING)
    missed = f", {summary.num_missed_target} never" if summary.num_missed_target else ""
    return Cell(text=f"{number(seconds)} s", quiet=f"{short(samples)} samples{missed}")


def _staleness(summary: StrategySummary) -> Cell:
    if math.isnan(summary.staleness_max):
        return Cell(text=NOTHING)
    return Cell(text=f"{summary.staleness_median:g} / {summary.staleness_max:g}")


COLUMNS: dict[str, Callable[[StrategySummary], Cell]] = {
    "workers": lambda summary: Cell(text=str(summary.num_workers or NOTHING)),
    "samples/s": _speed_cell,
    "speed-up": lambda summary: _judged(
        summary, f"{summary.speed_up:.2f}×" if math.isfinite(summary.speed_up) else NOTHING
    ),
    "efficiency": lambda summary: _judged(summary, percent(summary.efficiency)),
    "machine": lambda summary: Cell(text=percent(summary.machine)),
    "communication": lambda summary: _judged(summary, percent(summary.share_of_ceiling)),
    "exposed": _exposed,
    "sent per step": lambda summary: Cell(text=size(summary.split.num_bytes_sent)),
    "received per step": lambda summary: Cell(text=size(summary.bytes_received)),
    "final loss": lambda summary: _of(summary.final_loss),
    "held-out loss": lambda summary: _of(summary.held_out_loss),
    "held-out accuracy": lambda summary: _of(
        summary.held_out_accuracy, lambda share: percent(share, 1)
    ),
    "staleness": _staleness,
    "samples lost": lambda summary: Cell(text=number(summary.num_lost_samples)),
    "memory per rank": _memory,
}
"""The columns after the first, each with the function that fills its cells."""


def _columns_of(
    summaries: Sequence[StrategySummary],
) -> dict[str, Callable[[StrategySummary], Cell]]:
    """Return all columns; those of the cell's own metrics follow the other held-out scores."""
    names = dict.fromkeys(name for summary in summaries for name in summary.held_out_metrics)
    at = list(COLUMNS).index("held-out accuracy") + 1
    columns = list(COLUMNS.items())
    own = [(f"held-out {name}", partial(_held_out, name)) for name in names]
    logged = dict.fromkeys(name for summary in summaries for name in summary.last_metrics)
    own += [(f"last {name}", partial(_last, name)) for name in logged]
    return dict([*columns[:at], *own, *columns[at:]])


def _held_out(name: str, summary: StrategySummary) -> Cell:
    return _of(summary.held_out_metrics.get(name, Spread()))


def _last(name: str, summary: StrategySummary) -> Cell:
    return _of(summary.last_metrics.get(name, Spread()))


ONLY_DIFFERENCES = ("memory per rank",)
"""Columns that are left out where all rows are the same."""


def _alone(done: Sequence[StrategySummary], called: dict[int, str]) -> str:
    """Return the speeds of runs that cannot be compared with any other."""
    known = [s for s in done if math.isfinite(_speed(s))]
    return listed([f"{called[id(s)]} ran at {number(_speed(s))} samples/s" for s in known])


def _speeds(done: Sequence[StrategySummary], called: dict[int, str]) -> str:
    """Return each speed whose range does not overlap with the baseline's.

    Where all overlap, return the two strategies that differ most, if any do.
    """
    known = [s for s in done if math.isfinite(s.samples_per_second.middle)]
    if len(known) < 2 or len({s.comparison for s in known}) > 1:
        return ""  # different comparisons may have trained different models
    base = next((s for s in known if s.name == BASELINE), min(known, key=_speed))
    others = sorted((s for s in known if s is not base), key=_speed, reverse=True)
    clear = [s for s in others if not s.samples_per_second.overlaps(base.samples_per_second)]
    if not clear:
        if all(math.isnan(s.samples_per_second.low) for s in known):
            return "the runs are too short for ranges of samples/s, so none is shown to be faster"
        return _clearest_pair(others, called, called[id(base)])
    ratios = [f"{called[id(s)]} {_speed(s) / _speed(base):.2f}×" for s in clear]
    ratios[0] = ratios[0].replace(called[id(clear[0])], f"{called[id(clear[0])]} is", 1)
    return f"in samples/s, {listed(ratios)} {called[id(base)]}"


def _clearest_pair(others: Sequence[StrategySummary], called: dict[int, str], baseline: str) -> str:
    """Return the two strategies that differ most, where all overlap with the baseline.

    Args:
        others: all but the baseline, the fastest first.
        called: the name of each.
        baseline: the name of the baseline.
    """
    pairs = [
        (fast, slow)
        for fast, slow in combinations(others, 2)
        if not fast.samples_per_second.overlaps(slow.samples_per_second)
    ]
    if not pairs:
        return "the ranges of samples/s overlap, so no strategy is shown to be faster"
    fast, slow = max(pairs, key=lambda pair: _speed(pair[0]) / _speed(pair[1]))
    ratio = f"{_speed(fast) / _speed(slow):.2f}×"
    return (
        f"in samples/s, {called[id(fast)]} is {ratio} {called[id(slow)]}; "
        f"all ranges overlap with that of {baseline}"
    )


def _reached(done: Sequence[StrategySummary], called: dict[int, str], target: float) -> str:
    """Return when each reached the target, and which need clearly more or fewer samples."""
    reached = sorted(
        (s for s in done if math.isfinite(s.seconds_to_target.middle)),
        key=lambda s: s.seconds_to_target.middle,
    )
    never = [called[id(s)] for s in done if s not in reached]
    goal = f"a training loss of {target:g}"
    if not reached:
        return f"{listed(never)} never reached {goal}" if never else ""
    times = [f"{number(s.seconds_to_target.middle)} s by {called[id(s)]}" for s in reached]
    first = f"{goal} was reached after {listed(times)}"
    parts = [f"{first}, never by {listed(never)}" if never else first]
    base = next((s for s in reached if s.name == BASELINE), reached[0])
    parts += [
        f"{called[id(s)]} needs {percent(abs(more))} {'more' if more > 0 else 'fewer'} samples "
        f"than {called[id(base)]} to reach it"
        for s in reached
        if not s.samples_to_target.overlaps(base.samples_to_target)
        and s.comparison == base.comparison
        for more in [s.samples_to_target.middle / base.samples_to_target.middle - 1]
    ]
    return "; ".join(parts)


def _scores(done: Sequence[StrategySummary], called: dict[int, str]) -> Iterator[str]:
    """Yield each held-out score side by side, without a claim about which is better."""
    for name, cell_of in _columns_of(done).items():
        if name.startswith("held-out ") and name != "held-out loss":
            by_score: dict[str, list[str]] = {}
            for each in done:
                by_score.setdefault(cell_of(each).text, []).append(called[id(each)])
            by_score.pop(NOTHING, None)
            scores = [f"{score} for {listed(names)}" for score, names in by_score.items()]
            if scores:
                *most, last = scores
                yield f"{name} is {', '.join(most)}{', and ' if most else ''}{last}"


def _failures(summary: StrategySummary, name: str) -> str:
    parts = []
    if summary.num_diverged:
        parts.append(f"{name}'s loss became NaN or infinite")
    if summary.status in (Status.FAILED, Status.STOPPED):
        parts.append(f"{name} {'failed' if summary.status is Status.FAILED else 'was stopped'}")
    return "; ".join(parts)


def _speed(summary: StrategySummary) -> float:
    return summary.samples_per_second.middle
