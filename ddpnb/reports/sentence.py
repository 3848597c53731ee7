"""What a comparison shows, as one sentence: first what went wrong, then speeds and scores (kernel).

What it claims of speeds is in ``history.claims``; it claims nothing of accuracies.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from ddpnb.history.claims import (
    LEVEL,
    SMALLEST_EFFECT,
    Ratio,
    accuracies_differ,
    ratios_of,
    standard_error,
)
from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.history.summary import StrategySummary, summarise
from ddpnb.protocol.notation import Target
from ddpnb.reports.findings import accuracy_of, quantities_of
from ddpnb.reports.formatting import (
    NOTHING,
    emulated_devices,
    listed,
    number,
    percent,
)

ENDED = {Status.FAILED: "failed", Status.STOPPED: "was stopped"}


def sentence(comparison: Comparison, target: Target | None = None) -> str:
    """Return one sentence on speed, scores and failures, as far as they are known.

    Args:
        comparison: the runs.
        target: the sentence says when it was reached.  None: there is none.
    """
    summaries = summarise(comparison, target)
    done = [s for s in summaries if s.status is Status.FINISHED and not s.is_ceiling]
    parts = [
        *(f"{s.label}'s loss became NaN or infinite" for s in summaries if s.num_diverged),
        *(f"{s.label} {ENDED[s.status]}" for s in summaries if s.status in ENDED),
        _speeds(done),
        "" if target is None else _reached(done, target),
        *_scores(done),
        *(f"{s.label} says nothing about the speed of the real one" for s in done if s.is_emulated),
    ]
    text = "; ".join(part for part in parts if part) or _alone(done)
    if not text:
        return "Nothing has finished yet."
    if devices := emulated_devices(comparison):
        text += f"; all of it on {devices}"
    is_name = text.startswith(tuple(s.label for s in summaries))  # names keep their lower case
    return f"{text if is_name else text[0].upper() + text[1:]}."


def _alone(done: Sequence[StrategySummary]) -> str:
    """Return the speeds of runs that cannot be compared with any other."""
    rates = [(s.label, s.samples_per_second.middle) for s in done]
    return listed([f"{name} ran at {number(r)} samples/s" for name, r in rates if math.isfinite(r)])


def _speeds(done: Sequence[StrategySummary]) -> str:
    """Return each speed over that of the reference: what is shown, what is not, what is open."""
    if (ratios := ratios_of(done)) is None:
        return ""
    reference, speeds = ratios
    base = reference.label
    found = [(s.label, speeds[s.key]) for s in done if s.key in speeds]
    found = [(name, r) for name, r in found if r.num_repeats]
    found.sort(key=lambda each: each[1].middle, reverse=True)
    few = [(name, r) for name, r in found if not r.has_interval]
    claims = [(name, r) for name, r in found if r.is_claim]
    small = [name for name, r in found if r.is_small]
    rest = [(name, r) for name, r in found if r.has_interval and not (r.is_claim or r.is_small)]
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
        least = percent(SMALLEST_EFFECT)
        parts.append(f"no difference of {least} or more from {base} is shown for {listed(small)}")
    parts += [f"cannot tell {name} from {base}: {_between(r)}" for name, r in rest]
    return "; ".join(parts)


def _between(ratio: Ratio) -> str:
    """Return an interval, and how many repeats would show the ratio that was seen."""
    text = f"between {ratio.low:.2f}× and {ratio.high:.2f}×"
    if num := ratio.num_repeats_needed:
        text += f" (about {num} repeats would show {ratio.middle:.2f}×)"
    return text


def _in_few_runs(few: Sequence[tuple[str, Ratio]], base: str, *, is_computed: bool) -> str:
    """Return the speeds of one run or two, of which those of emulated devices do not vary."""
    texts = [f"{name} at {r.middle:.2f}×{'' if is_computed else _span(r)}" for name, r in few]
    speeds = f"{listed(texts)} the samples/s of {base}"
    if is_computed:
        return speeds
    runs = "one run" if {r.num_repeats for _, r in few} == {1} else "two runs at most"
    return f"{runs}: trust large differences only; {speeds}"


def _span(ratio: Ratio) -> str:
    """Return the two ratios of two repeats, or what the tenths of one run span."""
    if math.isnan(ratio.low):
        return ""
    ends = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.num_repeats > 1:
        return f" ({ends})"
    return f" (its tenths: {ends})" if ratio.excludes_one else f" (its tenths vary more: {ends})"


def _reached(done: Sequence[StrategySummary], target: Target) -> str:
    """Return when each reached the target, and which did not."""
    reached = sorted(
        (s for s in done if math.isfinite(s.seconds_to_target.middle) and not s.is_emulated),
        key=lambda s: s.seconds_to_target.middle,
    )
    never = [s.label for s in done if s.num_missed_target == s.num_runs]
    goal = target.text if target.is_accuracy else f"a training loss of {target.value:g}"
    parts = []
    if reached:
        times = [f"{number(s.seconds_to_target.middle)} s by {s.label}" for s in reached]
        parts.append(f"{goal} was reached after {listed(times)}")
    if never:
        parts.append(f"{listed(never)} never reached {goal}")
    parts += [
        f"{s.label} did not reach it in {s.num_missed_target} of {s.num_runs} repeats"
        for s in done
        if 0 < s.num_missed_target < s.num_runs
    ]
    return "; ".join(parts)


def _scores(done: Sequence[StrategySummary]) -> Iterator[str]:
    """Yield each held-out score side by side, without a claim about which is better."""
    for name, quantity in quantities_of(done).items():
        if name.startswith("held-out ") and name != "held-out loss":
            by_score: dict[str, list[str]] = {}
            for each in done:
                by_score.setdefault(quantity.cell_of(each).text, []).append(each.label)
            by_score.pop(NOTHING, None)
            scores = [f"{score} for {listed(names)}" for score, names in by_score.items()]
            if scores:
                *most, last = scores
                text = f"{name} is {', '.join(most)}{', and ' if most else ''}{last}"
                yield text + (_error(done) if name == "held-out accuracy" else "")


def _error(done: Sequence[StrategySummary]) -> str:
    """Return what accuracies on so many samples show, if their number is known."""
    shares = [accuracy_of(s) for s in done]
    shares = [share for share in shares if math.isfinite(share)]
    num = min((s.num_held_out for s in done if s.num_held_out), default=0)
    high, low = (percent(end(shares, default=0.0), 1) for end in (max, min))
    if num == 0 or high == low:
        return ""
    if not accuracies_differ(shares, num):
        return f": {num:,} samples cannot tell {high} from {low}"
    error = 100 * standard_error(fmean(shares), num)
    return f", with a standard error of {error:.1f} points ({num:,} samples)"
