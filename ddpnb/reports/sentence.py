"""The findings of a comparison as one computed sentence (kernel).

Where the ranges of two speeds overlap, it says nothing about which is faster.
"""

import math
from collections.abc import Sequence
from itertools import combinations

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.history.summary import StrategySummary, summarise
from ddpnb.protocol.catalogue import BASELINE
from ddpnb.reports.formatting import labels, listed, number, percent


def sentence(comparison: Comparison, target: float | None = None) -> str:
    """Return one sentence on speed, scores and failures, as far as they are known.

    Args:
        comparison: the runs.
        target: a training loss; the sentence says when it was reached.  None: no such loss.
    """
    summaries = summarise(comparison, target)
    names = labels(comparison)
    called = {id(summary): names[summary.comparison, summary.name] for summary in summaries}
    done = [summary for summary in summaries if summary.status is Status.FINISHED]
    parts = [
        _speeds([s for s in done if not s.is_emulated], called),
        "" if target is None else _reached(done, called, target),
        _accuracies(done, called),
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


def _accuracies(done: Sequence[StrategySummary], called: dict[int, str]) -> str:
    """Return the held-out scores side by side, without a claim about which is better."""
    known = [s for s in done if math.isfinite(s.held_out_accuracy.middle)]
    if not known:
        return ""
    by_share: dict[str, list[str]] = {}
    for each in known:
        share = percent(each.held_out_accuracy.middle, 1)
        by_share.setdefault(share, []).append(called[id(each)])
    shares = [f"{share} for {listed(names)}" for share, names in by_share.items()]
    text = ", and ".join([", ".join(shares[:-1]), shares[-1]] if len(shares) > 1 else shares)
    return f"held-out accuracy is {text}"


def _failures(summary: StrategySummary, name: str) -> str:
    parts = []
    if summary.num_diverged:
        parts.append(f"{name}'s loss became NaN or infinite")
    if summary.status in (Status.FAILED, Status.STOPPED):
        parts.append(f"{name} {'failed' if summary.status is Status.FAILED else 'was stopped'}")
    return "; ".join(parts)


def _speed(summary: StrategySummary) -> float:
    return summary.samples_per_second.middle
