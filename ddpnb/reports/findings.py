"""The findings of a comparison: a table with one row per strategy, and one sentence (kernel).

What the sentence claims of speeds is in ``history.claims``; it claims nothing of accuracies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ddpnb.history.claims import (
    LEVEL,
    SMALLEST_EFFECT,
    Ratio,
    Ratios,
    accuracies_differ,
    ratios_of,
    standard_error,
)
from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.history.summary import Spread, StrategySummary, summarise
from ddpnb.protocol.catalogue import BASELINE, CEILING
from ddpnb.protocol.notation import Target
from ddpnb.reports.formatting import (
    NOTHING,
    choice_of_rates,
    emulated_devices,
    labels,
    learning_rates,
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
    "repeats": "samples/s: geometric mean and range over the repeats",
    "tenths": "samples/s: mean of the run, and range over its tenths",
}
"""The note that explains a range, by what the range is over."""
MAX_SHARE_OF_CEILING = 1.05
"""Above this share of ``no-comm``'s speed, efficiency is not split: it is no ceiling."""


def results_table(comparison: Comparison, target: Target | None = None) -> Table:
    """Return one row per strategy, without the columns that hold no information.

    Args:
        comparison: the runs.
        target: a column shows when it was reached.  None: no such column.
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
    if rates := learning_rates(comparison):
        cells = tuple(Cell(text=rates.get((s.comparison, s.name), NOTHING)) for s in summaries)
        columns.append((Column(title="lr", is_number=True), cells))
    is_classified = any(math.isfinite(s.held_out_accuracy.middle) for s in summaries)
    for name, cell_of in _columns_of(summaries).items():
        cells = tuple(map(cell_of, summaries))
        is_redundant = is_classified and name == "held-out loss"  # still in to_frame()
        is_redundant |= name == "workers" and not _workers_differ(summaries)
        is_redundant |= name == "received per step" and all(map(_receives_as_it_sends, summaries))
        is_redundant |= name == "memory per rank" and len({cell.text for cell in cells}) == 1
        if not is_redundant and any(cell.text != NOTHING for cell in cells):
            columns.append((Column(title=name, is_number=True), cells))
        if name == "samples/s" and target is not None:
            reached = tuple(_target_cell(summary) for summary in summaries)
            columns.append((Column(title=f"to {target.text}", is_number=True), reached))
    return Table(
        caption=title(comparison),
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        notes=_column_notes(summaries, [column.title for column, _ in columns])
        + notes(comparison, summaries),
    )


def sentence(comparison: Comparison, target: Target | None = None) -> str:
    """Return one sentence on speed, scores and failures, as far as they are known.

    Args:
        comparison: the runs.
        target: the sentence says when it was reached.  None: there is none.
    """
    summaries = summarise(comparison, target)
    names = labels(comparison)
    called = {id(summary): names[summary.comparison, summary.name] for summary in summaries}
    done = [s for s in summaries if s.status is Status.FINISHED and not s.is_ceiling]
    ratios = ratios_of(done)
    parts = [
        *(_failures(summary, called[id(summary)]) for summary in summaries),
        "" if ratios is None else _speeds(done, called, ratios),
        "" if target is None else _reached(done, called, target, ratios),
        *_scores(done, called),
        *(
            f"{called[id(s)]} says nothing about the speed of the real one"
            for s in done
            if s.is_emulated
        ),
    ]
    text = "; ".join(part for part in parts if part) or _alone(done, called)
    if not text:
        return "Nothing has finished yet."
    if rates := choice_of_rates(comparison):
        text += f"; {rates}"
    if devices := emulated_devices(comparison):
        text += f"; all of it on {devices}"
    is_name = text.startswith(tuple(called.values()))  # names keep their lower case
    return f"{text if is_name else text[0].upper() + text[1:]}."


def _workers_differ(summaries: Sequence[StrategySummary]) -> bool:
    """Return whether strategies other than the baseline differ in their number of workers."""
    return len({s.num_workers for s in summaries if s.num_workers and s.name != BASELINE}) > 1


def _column_notes(summaries: Sequence[StrategySummary], shown: Sequence[str]) -> tuple[str, ...]:
    overs: dict[str, list[str]] = {}
    for s in summaries:
        if s.samples_per_second.over:
            overs.setdefault(s.samples_per_second.over, []).append(s.name)
    is_stale = any(math.isfinite(s.staleness_max) for s in summaries)
    found = [
        RANGES[over] + (f" ({listed(names)})" if len(overs) > 1 else "")
        for over, names in overs.items()
    ]
    found += ["staleness: median / maximum"] if is_stale else []
    if "efficiency" in shown and any(math.isfinite(s.machine) for s in summaries):
        found.append(
            "efficiency = machine × communication: no-comm over devices × single, "
            "and the strategy over no-comm"
        )
    alike = [s for s in summaries if s.num_workers > 1 and s.has_even_shares and not s.is_emulated]
    if quicker := [s.name for s in alike if _outran_ceiling(s)]:
        remedy = "more repeats even out" if "repeats" in overs else "--repeats 3 evens out"
        found.append(
            f"no-comm was measured slower than {listed(quicker)}, so its efficiency is not split: "
            f"the machine may have been busier then, which {remedy}"
        )
    if any(s.is_emulated for s in summaries):
        found.append(
            "in brackets: emulated on CPU threads, which says little about the real one's speed"
        )
    if any(s.split.parts.hidden > 0 and s.uses_cores for s in summaries):
        found.append("communication hidden on a CPU still takes a core's time")
    if "exposed" in shown and any(s.split.exposed_share > 0 for s in summaries):
        found.append(
            "exposed: share of a step in which a rank exchanges tensors or waits for other ranks, "
            "and computes nothing"
        )
    for name in _own_metrics(summaries):
        judged = [s for s in summaries if name in s.held_out_metrics]
        if unknown := [s.name for s in judged if math.isnan(s.held_out_metrics[name].middle)]:
            found.append(f"held-out {name} is NaN for {listed(unknown)}")
    if "memory per rank" in shown:
        is_known = any(s.memory.activations for s in summaries)
        is_published = not is_known and any(s.is_computed for s in summaries)
        held = "memory per rank" + ", computed for the published model" * is_published
        rest = "and activations" if is_known else "(activations are not known)"
        found.append(f"{held}: parameters, gradients, optimizer state {rest}, where it is most")
    found += _intervals(summaries)
    known = [s for s in summaries if s.num_held_out and math.isfinite(s.held_out_accuracy.middle)]
    if known:
        found.append(f"held-out accuracy: standard error {_accuracy_error(known)}")
    return tuple(found)


def _intervals(summaries: Sequence[StrategySummary]) -> Iterator[str]:
    """Yield the note with the interval of each speed over that of the reference."""
    ratios = ratios_of(summaries)
    known = [(s, r) for s in summaries for r in [_speed_ratio(s, ratios)] if r.has_interval]
    if ratios is None or not known:
        return
    nums = sorted({r.num_repeats for _, r in known})
    together = f", for {ratios.num_claims} comparisons together" if ratios.num_claims > 1 else ""
    yield (
        f"samples/s over those of {ratios.reference.name}, {percent(LEVEL)} interval over "
        f"{' and '.join(map(str, nums))} repeats{together}: "
        + ", ".join(f"{s.name} {r.low:.2f} to {r.high:.2f}" for s, r in known)
    )


def _speed_ratio(summary: StrategySummary, ratios: Ratios | None) -> Ratio:
    return Ratio() if ratios is None else ratios.speed.get(summary.key, Ratio())


def _accuracy_error(known: Sequence[StrategySummary]) -> str:
    """Return the standard error of the mean accuracy, e.g. ``0.8 points (360 samples)``."""
    num = min(s.num_held_out for s in known)
    mean = sum(s.held_out_accuracy.middle for s in known) / len(known)
    return f"{100 * standard_error(mean, num):.1f} points ({num:,} samples)"


def _state(summary: StrategySummary) -> str:
    state = "" if summary.status is Status.FINISHED else summary.status.value
    repeats = f"{summary.num_runs} repeats" if summary.num_runs > 1 else ""
    return ", ".join(part for part in (repeats, state) if part)


def _speed_cell(summary: StrategySummary) -> Cell:
    speed = summary.samples_per_second
    middle = _judged(summary, number(speed.middle))
    return middle if math.isnan(speed.low) else replace(middle, quiet=_range(speed, number))


def _efficiency(summary: StrategySummary) -> Cell:
    """Return the efficiency, and below it its parts: machine × communication."""
    whole = _judged(summary, percent(summary.efficiency))
    unknown = math.isnan(summary.machine) or math.isnan(summary.share_of_ceiling)
    if unknown or _outran_ceiling(summary):
        return whole
    parts = percent(summary.machine), percent(summary.share_of_ceiling)
    return replace(whole, quiet=" × ".join(parts))


def _outran_ceiling(summary: StrategySummary) -> bool:
    """Return whether ``no-comm`` is no ceiling for it."""
    return summary.share_of_ceiling > MAX_SHARE_OF_CEILING


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
    memory = summary.memory
    if not memory.total:
        return Cell(text=NOTHING)
    return Cell(text=size(memory.total), quiet="peak" if memory.peak else "")


def _receives_as_it_sends(summary: StrategySummary) -> bool:
    sent, received = summary.split.num_bytes_sent, summary.bytes_received
    return size(sent) == size(received) or math.isnan(received)


def _target_cell(summary: StrategySummary) -> Cell:
    """Return the seconds and samples after which the target was reached."""
    seconds, samples = summary.seconds_to_target.middle, summary.samples_to_target.middle
    if summary.is_ceiling or math.isnan(seconds):
        return Cell(text=NOTHING)
    missed = f"{summary.num_missed_target} never" if summary.num_missed_target else ""
    if math.isinf(seconds):
        return Cell(
            text="never", quiet=missed if summary.num_missed_target < summary.num_runs else ""
        )
    parts = [f"{short(samples)} samples", *filter(None, [missed])]
    return Cell(text=f"{number(seconds)} s", quiet=", ".join(parts))


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
    "efficiency": _efficiency,
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
    names = _own_metrics(summaries)
    at = list(COLUMNS).index("held-out accuracy") + 1
    columns = list(COLUMNS.items())
    own = [(f"held-out {name}", partial(_held_out, name)) for name in names]
    logged = dict.fromkeys(name for summary in summaries for name in summary.last_metrics)
    own += [(f"last {name}", partial(_last, name)) for name in logged]
    return dict([*columns[:at], *own, *columns[at:]])


def _own_metrics(summaries: Sequence[StrategySummary]) -> Iterable[str]:
    """Return the names of what the cell's own functions measure on held-out samples."""
    return dict.fromkeys(name for summary in summaries for name in summary.held_out_metrics)


def _held_out(name: str, summary: StrategySummary) -> Cell:
    return _of(summary.held_out_metrics.get(name, Spread()))


def _last(name: str, summary: StrategySummary) -> Cell:
    return _of(summary.last_metrics.get(name, Spread()))


def _alone(done: Sequence[StrategySummary], called: dict[int, str]) -> str:
    """Return the speeds of runs that cannot be compared with any other."""
    rates = [(called[id(s)], s.samples_per_second.middle) for s in done]
    return listed([f"{name} ran at {number(r)} samples/s" for name, r in rates if math.isfinite(r)])


def _speeds(done: Sequence[StrategySummary], called: dict[int, str], ratios: Ratios) -> str:
    """Return each speed over that of the reference: what is shown, what is not, what is open."""
    base = called[id(ratios.reference)]
    found = [(called[id(s)], r) for s in done for r in [_speed_ratio(s, ratios)] if r.num_repeats]
    found.sort(key=lambda each: each[1].middle, reverse=True)
    few = [(name, r) for name, r in found if not r.has_interval]
    claims = [(name, r) for name, r in found if r.is_claim]
    small = [(name, r) for name, r in found if r.has_interval and r.excludes_one and not r.is_claim]
    open_ = [(name, r) for name, r in found if r.has_interval and not r.excludes_one]
    parts = []
    if few:
        is_computed = all(s.is_computed for s in done)
        parts.append(_in_few_runs(few, base, is_computed=is_computed))
    if claims:
        verbs = ["is ", *[""] * len(claims)]
        texts = [
            f"{name} {verb}{r.middle:.2f}× {base} ({r.low:.2f} to {r.high:.2f} at {percent(LEVEL)})"
            for (name, r), verb in zip(claims, verbs, strict=False)
        ]
        parts.append(f"in samples/s, {listed(texts)}")
    if small:
        names = listed([name for name, _ in small])
        parts.append(f"{names} and {base} differ by less than {percent(SMALLEST_EFFECT)}")
    parts += [f"cannot tell {name} from {base}: {_between(r)}" for name, r in open_]
    return "; ".join(parts)


def _between(ratio: Ratio) -> str:
    """Return an interval, and how many repeats would show the ratio that was seen."""
    text = f"between {ratio.low:.2f}× and {ratio.high:.2f}×"
    if num := ratio.num_repeats_needed:
        text += f" (about {num} repeats would show {ratio.middle:.2f}×)"
    return text


def _in_few_runs(few: Sequence[tuple[str, Ratio]], base: str, *, is_computed: bool) -> str:
    """Return the speeds of one run or two, with what these runs span by themselves."""
    texts = [f"{name} at {r.middle:.2f}×{'' if is_computed else _span(r)}" for name, r in few]
    speeds = f"{listed(texts)} the samples/s of {base}"
    if is_computed:
        return speeds
    runs = "one run" if {r.num_repeats for _, r in few} == {1} else "two runs at most"
    return f"{runs}: trust large differences only; {speeds}"


def _span(ratio: Ratio) -> str:
    """Return what two repeats, or the tenths of one run, span."""
    if math.isnan(ratio.low):
        return ""
    ends = f"{ratio.low:.2f} to {ratio.high:.2f}"
    own = "its tenths" if ratio.num_repeats == 1 else "its repeats"
    return f" ({own}: {ends})" if ratio.excludes_one else f" (within the spread of {own}: {ends})"


def _reached(
    done: Sequence[StrategySummary], called: dict[int, str], target: Target, ratios: Ratios | None
) -> str:
    """Return when each reached the target, and which need clearly more or fewer samples."""
    reached = sorted(
        (s for s in done if math.isfinite(s.seconds_to_target.middle) and not s.is_emulated),
        key=lambda s: s.seconds_to_target.middle,
    )
    never = [called[id(s)] for s in done if s.num_missed_target == s.num_runs]
    goal = target.text if target.is_accuracy else f"a training loss of {target.value:g}"
    parts = []
    if reached:
        times = [f"{number(s.seconds_to_target.middle)} s by {called[id(s)]}" for s in reached]
        parts.append(f"{goal} was reached after {listed(times)}")
    if never:
        parts.append(f"{listed(never)} never reached {goal}")
    parts += [
        f"{called[id(s)]} did not reach it in {s.num_missed_target} of {s.num_runs} repeats"
        for s in done
        if 0 < s.num_missed_target < s.num_runs
    ]
    if ratios is not None:
        parts += [
            f"{called[id(s)]} needs {_more(found, called[id(ratios.reference)])}"
            for s in reached
            for found in [ratios.samples.get(s.key, Ratio())]
            if found.is_claim
        ]
    return "; ".join(parts)


def _more(ratio: Ratio, reference: str) -> str:
    """Return e.g. ``31 % more samples than single to reach it (20 to 43 % at 95 %)``."""
    word = "more" if ratio.middle > 1 else "fewer"
    low, high = (percent(end) for end in sorted(abs(end - 1) for end in (ratio.low, ratio.high)))
    return (
        f"{percent(abs(ratio.middle - 1))} {word} samples than {reference} to reach it "
        f"({low.removesuffix(' %')} to {high} at {percent(LEVEL)})"
    )


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
                text = f"{name} is {', '.join(most)}{', and ' if most else ''}{last}"
                yield text + (_within_error(done) if name == "held-out accuracy" else "")


def _within_error(done: Sequence[StrategySummary]) -> str:
    """Return what accuracies on so many samples show; empty for one, or without their number."""
    known = [s for s in done if math.isfinite(s.held_out_accuracy.middle)]
    num = min((s.num_held_out for s in known), default=0)
    shares = [s.held_out_accuracy.middle for s in known]
    high, low = (percent(end(shares, default=0.0), 1) for end in (max, min))
    if num == 0 or high == low:
        return ""
    if not accuracies_differ(shares, num):
        return f": {num:,} samples cannot tell {high} from {low}"
    return f", with a standard error of {_accuracy_error(known)}"


def _failures(summary: StrategySummary, name: str) -> str:
    parts = []
    if summary.num_diverged:
        parts.append(f"{name}'s loss became NaN or infinite")
    if summary.status in (Status.FAILED, Status.STOPPED):
        parts.append(f"{name} {'failed' if summary.status is Status.FAILED else 'was stopped'}")
    return "; ".join(parts)
