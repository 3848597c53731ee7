"""The result of a comparison as one sentence: first failures, then speeds and scores.

``results.claims`` decides which speeds differ.  The sentence never says which accuracy is better.
Runs in the kernel.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from ddpnb.protocol.notation import Target
from ddpnb.reports.findings import accuracy_of, quantities_of
from ddpnb.reports.formatting import (
    NOTHING,
    emulated_devices,
    listed,
    number,
    percent,
)
from ddpnb.results.claims import (
    LEVEL,
    SMALLEST_EFFECT,
    Ratio,
    accuracies_differ,
    ratios_of,
    standard_error,
)
from ddpnb.results.comparison import Comparison
from ddpnb.results.model import Status
from ddpnb.results.summary import StrategySummary, summarise

ENDED = {Status.FAILED: "failed", Status.STOPPED: "was stopped"}


def sentence(comparison: Comparison, target: Target | None = None) -> str:
    """Return one sentence about the failures, speeds and scores of a comparison.

    Args:
        comparison: the comparison.
        target: if given, the sentence also says when each strategy reached this target.
    """
    summaries = summarise(comparison, target)
    done = [s for s in summaries if s.status is Status.FINISHED and not s.is_ceiling]
    parts = [
        *(f"{s.label}'s loss became NaN or infinite" for s in summaries if s.num_diverged),
        *(f"{s.label} {ENDED[s.status]}" for s in summaries if s.status in ENDED),
        _speeds(done),
        "" if target is None else _reached(done, target),
        *_scores(done),
        *(f"the speed of {s.label} says nothing about real devices" for s in done if s.is_emulated),
    ]
    text = "; ".join(part for part in parts if part) or _alone(done)
    if not text:
        return "No run has finished yet."
    if devices := emulated_devices(comparison):
        text += f"; times are computed for {devices}"
    is_name = text.startswith(tuple(s.label for s in summaries))  # names stay in lower case
    return f"{text if is_name else text[0].upper() + text[1:]}."


def _alone(done: Sequence[StrategySummary]) -> str:
    """Return a text with the speed of each strategy, if there are no speeds to compare."""
    rates = [(s.label, s.samples_per_second.middle) for s in done]
    return listed([f"{name} ran at {number(r)} samples/s" for name, r in rates if math.isfinite(r)])


def _speeds(done: Sequence[StrategySummary]) -> str:
    """Return a text with each strategy's speed relative to the reference, and its uncertainty."""
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
            f"{name} {verb}{r.middle:.2f}× {base} "
            f"({percent(LEVEL)} interval: {r.low:.2f} to {r.high:.2f})"
            for (name, r), verb in zip(claims, verbs, strict=False)
        ]
        parts.append(f"in samples/s, {listed(texts)}")
    if small:
        least = f"{percent(SMALLEST_EFFECT)} or more"
        parts.append(f"for {listed(small)}, the runs show no difference of {least} from {base}")
    parts += [f"{name} may be faster or slower than {base}: {_between(r)}" for name, r in rest]
    return "; ".join(parts)


def _between(ratio: Ratio) -> str:
    """Return a ratio's interval, and the number of repeats that would confirm the ratio."""
    text = f"between {ratio.low:.2f}× and {ratio.high:.2f}×"
    if num := ratio.num_repeats_needed:
        text += f" (about {num} repeats would be enough to show {ratio.middle:.2f}×)"
    return text


def _in_few_runs(few: Sequence[tuple[str, Ratio]], base: str, *, is_computed: bool) -> str:
    """Return relative speeds from one or two runs, with a range if the speeds were measured."""
    texts = [f"{name} reaches {r.middle:.2f}×{'' if is_computed else _span(r)}" for name, r in few]
    speeds = f"{listed(texts)} the samples/s of {base}"
    if is_computed:
        return speeds
    runs = "one run each" if {r.num_repeats for _, r in few} == {1} else "at most two runs each"
    return f"with {runs}, trust only large differences; {speeds}"


def _span(ratio: Ratio) -> str:
    """Return the ratios of two repeats, or the range within the run if there is one repeat."""
    if math.isnan(ratio.low):
        return ""
    ends = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.num_repeats > 1:
        return f" ({ends})"
    return f" ({ends} within the run)" if ratio.excludes_one else f" (uncertain: {ends} in the run)"


def _reached(done: Sequence[StrategySummary], target: Target) -> str:
    """Return a text that says when strategies reached the target, and which strategies did not."""
    reached = sorted(
        (s for s in done if math.isfinite(s.seconds_to_target.middle) and not s.is_emulated),
        key=lambda s: s.seconds_to_target.middle,
    )
    never = [s.label for s in done if s.num_missed_target == s.num_runs]
    goal = target.text if target.is_accuracy else f"a training loss of {target.value:g}"
    parts = []
    if reached:
        times = [f"by {s.label} after {number(s.seconds_to_target.middle)} s" for s in reached]
        parts.append(f"{goal} was reached {listed(times)}")
    if never:
        parts.append(f"{listed(never)} never reached {goal}")
    parts += [
        f"{s.label} did not reach {goal} in {s.num_missed_target} of {s.num_runs} repeats"
        for s in done
        if 0 < s.num_missed_target < s.num_runs
    ]
    return "; ".join(parts)


def _scores(done: Sequence[StrategySummary]) -> Iterator[str]:
    """Yield a text for each held-out score: the scores of all strategies, without a ranking."""
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
    """Return a text with the standard error of the accuracies, or ``""`` if it is not known."""
    shares = [accuracy_of(s) for s in done]
    shares = [share for share in shares if math.isfinite(share)]
    num = min((s.num_held_out for s in done if s.num_held_out), default=0)
    high, low = (percent(end(shares, default=0.0), 1) for end in (max, min))
    if num == 0 or high == low:
        return ""
    if not accuracies_differ(shares, num):
        return f": {num:,} samples are too few to tell {high} from {low}"
    error = 100 * standard_error(fmean(shares), num)
    return f", with a standard error of {error:.1f} points ({num:,} samples)"
