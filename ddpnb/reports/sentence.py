"""The result of a comparison as one sentence: first failures, then speeds and scores.

``results.ratios`` decides which strategies differ.  Runs in the kernel.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from ddpnb.protocol.notation import Target
from ddpnb.reports.findings import quantities_of
from ddpnb.reports.formatting import NOTHING, counted, listed, number, percent
from ddpnb.results.frames import Row
from ddpnb.results.ratios import (
    LEVEL,
    POWER,
    SMALLEST_ACCURACY_EFFECT,
    SMALLEST_EFFECT,
    Verdict,
    accuracies_differ,
    standard_error,
)
from ddpnb.results.run import Status

ENDED = {Status.FAILED.value: "failed", Status.STOPPED.value: "was stopped"}


def sentence(
    strategies: Sequence[Row],
    ratios: Sequence[Row],
    target: Target | None = None,
    emulated: str = "",
) -> str:
    """Return one sentence about the failures, speeds and scores of a comparison.

    Args:
        strategies: the rows of ``strategies_frame``.
        ratios: the rows of ``ratios_frame``.
        target: if given, the sentence also says when each strategy reached this target.
        emulated: the emulated devices, such as ``"8 emulated V100"``, or ``""``.
    """
    done = [s for s in strategies if s["status"] == Status.FINISHED.value and not s["is_ceiling"]]
    parts = [
        *(f"{s['label']}'s loss became NaN or infinite" for s in strategies if s["num_diverged"]),
        *(f"{s['label']} {ENDED[s['status']]}" for s in strategies if s["status"] in ENDED),
        _speeds(done, [row for row in ratios if row["quantity"] == "samples_per_second"]),
        "" if target is None else _reached(done, target),
        *_scores(done, ratios),
        *(
            f"the speed of {s['label']} says nothing about real devices"
            for s in done
            if s["is_emulated"]
        ),
    ]
    text = "; ".join(part for part in parts if part) or _alone(done)
    if not text:
        return "No run has finished yet."
    if emulated:
        text += f"; times are computed for {emulated}"
    is_name = text.startswith(tuple(s["label"] for s in strategies))  # names stay in lower case
    return f"{text if is_name else text[0].upper() + text[1:]}."


def _alone(done: Sequence[Row]) -> str:
    """Return a text with the speed of each strategy, if there are no speeds to compare."""
    rates = [(s["label"], s["samples_per_second"]) for s in done]
    return listed([f"{name} ran at {number(r)} samples/s" for name, r in rates if math.isfinite(r)])


def _speeds(done: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return a text with each strategy's speed relative to the reference, and its uncertainty."""
    label = {s["strategy"]: s["label"] for s in done}
    found = [row for row in ratios if {row["strategy"], row["reference"]} <= label.keys()]
    found.sort(key=lambda row: float(row["ratio"]), reverse=True)
    if not found:
        return ""
    base = label[found[0]["reference"]]
    named: dict[str, list[tuple[str, Row]]] = {verdict: [] for verdict in Verdict}
    for row in found:
        named[row["verdict"]].append((label[row["strategy"]], row))
    parts = []
    if few := named[Verdict.FEW_REPEATS]:
        is_computed = all(s["is_computed"] for s in done)
        parts.append(_in_few_runs(few, base, is_computed=is_computed))
    if claims := named[Verdict.DIFFERENT]:
        verbs = ["is ", *[""] * len(claims)]
        texts = [
            f"{name} {verb}{row['ratio']:.2f}× {base} "
            f"({percent(LEVEL)} interval: {row['low']:.2f} to {row['high']:.2f})"
            for (name, row), verb in zip(claims, verbs, strict=False)
        ]
        parts.append(f"in samples/s, {listed(texts)}")
    if similar := [name for name, _ in named[Verdict.SIMILAR]]:
        least = f"{percent(SMALLEST_EFFECT)} or more"
        parts.append(f"for {listed(similar)}, the runs show no difference of {least} from {base}")
    parts += [
        f"{name} may be faster or slower than {base}: {_between(row)}"
        for name, row in named[Verdict.UNDECIDED]
    ]
    return "; ".join(parts)


def _between(row: Row) -> str:
    """Return a ratio's interval, and the number of repeats that would probably show the ratio."""
    text = f"between {row['low']:.2f}× and {row['high']:.2f}×"
    if num := row["repeats_needed"]:
        text += (
            f" (if {row['ratio']:.2f}× is right, --repeats {num} shows a difference with "
            f"{percent(POWER)} probability)"
        )
    return text


def _in_few_runs(few: Sequence[tuple[str, Row]], base: str, *, is_computed: bool) -> str:
    """Return relative speeds from one or two runs, with a range if the speeds were measured."""
    texts = [
        f"{name} reaches {row['ratio']:.2f}×{'' if is_computed else _span(row)}"
        for name, row in few
    ]
    speeds = f"{listed(texts)} the samples/s of {base}"
    if is_computed:
        return speeds
    runs = (
        "one run each" if {row["num_repeats"] for _, row in few} == {1} else "at most two runs each"
    )
    return f"with {runs}, trust only large differences; {speeds}"


def _span(row: Row) -> str:
    """Return the ratios of two repeats, or the range within the run if there is one repeat."""
    if math.isnan(row["low"]):
        return ""
    ends = f"{row['low']:.2f} to {row['high']:.2f}"
    if row["num_repeats"] > 1:
        return f" ({ends})"
    is_certain = row["low"] > 1 or row["high"] < 1
    return f" ({ends} within the run)" if is_certain else f" (uncertain: {ends} in the run)"


def _reached(done: Sequence[Row], target: Target) -> str:
    """Return a text that says when strategies reached the target, and which strategies did not."""
    reached = sorted(
        (s for s in done if math.isfinite(s["seconds_to_target"]) and not s["is_emulated"]),
        key=lambda s: float(s["seconds_to_target"]),
    )
    goal = target.text if target.is_accuracy else f"a training loss of {target.value:g}"
    parts = []
    if reached:
        times = [f"by {s['label']} after {number(s['seconds_to_target'])} s" for s in reached]
        parts.append(f"{goal} was reached {listed(times)}")
    if never := [s["label"] for s in done if s["num_missed_target"] == s["num_runs"]]:
        parts.append(f"{listed(never)} never reached {goal}")
    parts += [
        f"{s['label']} did not reach {goal} in {s['num_missed_target']} of {s['num_runs']} repeats"
        for s in done
        if 0 < s["num_missed_target"] < s["num_runs"]
    ]
    return "; ".join(parts)


def _scores(done: Sequence[Row], ratios: Sequence[Row]) -> Iterator[str]:
    """Yield a text for each held-out score of all strategies."""
    for quantity in quantities_of(done):
        if not quantity.title.startswith("held-out ") or quantity.title == "held-out loss":
            continue
        labels: dict[str, list[str]] = {}
        for row in done:
            labels.setdefault(quantity.cell_of(row).text, []).append(row["label"])
        labels.pop(NOTHING, None)
        if labels:
            *most, last = [f"{score} for {listed(names)}" for score, names in labels.items()]
            text = f"{quantity.title} is {', '.join(most)}{', and ' if most else ''}{last}"
            is_accuracy = quantity.title == "held-out accuracy"
            yield text + (_seeds(done) + _error(done, ratios) if is_accuracy else "")


def _seeds(done: Sequence[Row]) -> str:
    """Return the number of seeds of the scores, and a warning if the samples chose the rate."""
    nums = {row["num_scored"] for row in done}
    text = "one seed" if nums == {1} else f"median of {counted(max(nums), 'seed')}"
    if any(row["is_tuned"] and row["num_scored"] == row["num_runs"] for row in done):
        text += ", whose held-out samples chose the learning rate"
    return f" ({text})"


def _error(done: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Return a text that says if the accuracies differ, or ``""`` if this is not known."""
    shares = {row["strategy"]: row["held_out_accuracy"] for row in done}
    shares = {name: share for name, share in shares.items() if math.isfinite(share)}
    high, low = (percent(end(shares.values(), default=0.0), 1) for end in (max, min))
    if high == low:
        return ""
    own = [row for row in ratios if row["quantity"] == "held_out_accuracy"]
    if own and all(row["verdict"] != Verdict.FEW_REPEATS for row in own):
        return _over_seeds(own, shares, f"{high} from {low}")
    num = min((row["num_held_out"] for row in done if row["num_held_out"]), default=0)
    if num == 0:
        return ""
    if not accuracies_differ(list(shares.values()), num):
        return f": {num:,} samples are too few to tell {high} from {low}"
    error = 100 * standard_error(fmean(shares.values()), num)
    return f", with a standard error of {error:.1f} points ({num:,} samples) without the seeds"


def _over_seeds(ratios: Sequence[Row], shares: dict[str, float], ends: str) -> str:
    """Return the differences of accuracies, in points, with intervals that include the seeds."""
    base = ratios[0]["reference"]
    scale = 100 * shares[base]
    texts = [
        f"{row['strategy']} is {abs(scale * (row['ratio'] - 1)):.1f} points "
        f"{'above' if row['ratio'] > 1 else 'below'} {base} ({percent(LEVEL)} interval: "
        f"{scale * (row['low'] - 1):+.1f} to {scale * (row['high'] - 1):+.1f})"
        for row in ratios
        if row["verdict"] == Verdict.DIFFERENT
    ]
    if texts:
        return f"; {listed(texts)}"
    if any(row["verdict"] == Verdict.UNDECIDED for row in ratios):
        num = min(row["num_repeats"] for row in ratios)
        return f": {counted(num, 'seed')} are too few to tell {ends}"
    least = percent(SMALLEST_ACCURACY_EFFECT, 1)
    return f": these seeds show no difference of {least} or more from {base}"
