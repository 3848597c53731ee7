"""Chooses the learning rate of each strategy if several rates are tried.  Runs in the kernel.

``--lr 0.02,0.05,0.1`` trains each strategy once at each rate, all with the first repeat's seed.
For each strategy, the comparison uses the rate with the lowest held-out loss.  The run at this rate
is the first repeat, and all other repeats train at this rate.  NaN and infinite losses count as
the highest losses.  If all losses are NaN or infinite, the comparison uses the smallest rate.
"""

import math
from collections.abc import Sequence

from ddpnb.results.run import RunSnapshot, Status


def split(
    runs: Sequence[RunSnapshot],
) -> tuple[tuple[RunSnapshot, ...], tuple[RunSnapshot, ...]]:
    """Return the runs that are compared, and the runs at other learning rates.

    The strategies stay in the order in which their first runs began.
    """
    best = {key: _rate(min(group, key=_rank)) for key, group in tried(runs).items()}
    others = tuple(run for run in runs if _rate(run) != best.get(_key(run), _rate(run)))
    if not others:
        return tuple(runs), ()
    order = list(dict.fromkeys(map(_key, runs)))
    compared = [run for run in runs if run not in others]
    return tuple(sorted(compared, key=lambda run: order.index(_key(run)))), others


def tried(runs: Sequence[RunSnapshot]) -> dict[tuple[str, str], list[RunSnapshot]]:
    """Return the runs of each comparison and strategy for which several rates are tried."""
    groups: dict[tuple[str, str], list[RunSnapshot]] = {}
    for run in runs:
        if run.repeat == 0 and run.spec is not None and run.spec.rates:
            groups.setdefault(_key(run), []).append(run)
    return groups


def has_score(run: RunSnapshot) -> bool:
    """Return True if the held-out loss of a run is finite, so that its rate may be chosen."""
    return math.isfinite(run.reported("held_out_loss"))


def has_diverged(run: RunSnapshot) -> bool:
    """Return True if a run finished and the held-out loss of its model is not finite."""
    is_judged = any(report.num_held_out for report in run.reports)
    return run.status is Status.FINISHED and is_judged and not has_score(run)


def _rank(run: RunSnapshot) -> tuple[bool, bool, bool, float, float]:
    """Return the key to sort a strategy's runs.  A run that is being trained is sorted first."""
    is_cut_short = run.status not in (Status.FINISHED, Status.FAILED)
    loss = run.reported("held_out_loss") if has_score(run) else math.inf
    return not run.is_running, not has_score(run), is_cut_short, loss, _rate(run)


def _key(run: RunSnapshot) -> tuple[str, str]:
    return run.comparison, run.name


def _rate(run: RunSnapshot) -> float:
    return 0.0 if run.spec is None else run.spec.learning_rate
