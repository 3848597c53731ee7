"""How large a learning rate is stable where gradients are stale?  (Kernel.)

Near a minimum along a direction of curvature h, the w-th coordinate of asynchronous SGD with one
server, momentum m, N workers of weight 1/N and a staleness of d follows

    w(t+1)  =  w(t) + m (w(t) - w(t-1)) - (lr / N) h w(t-d)

``docs/comparison.md`` derives the limit; a test compares it with the recurrence itself.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddpnb.history.model import RunSnapshot
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_strategy

WORTH_WORDS = 0.5
"""The largest fraction of the synchronous learning rate that has a note."""
_POINTS = 64
"""Of the grid, for each turn of the fastest term."""


def stable_rate(momentum: float, staleness: int, momentum_lag: int = 1) -> float:
    """Return the limit of a = rate * h, below which updates at this rate are stable.

    The roots of (z - 1) (1 - m z^-l) = -a z^-d all lie within the unit circle for a small a > 0.
    The limit is the smallest a for which one of them lies on it: at z = exp(i t), 0 < t <= pi,

        a  =  -z^d (z - 1) (1 - m z^-l)   must be real and positive.

    Args:
        momentum: m, at least 0 and less than 1.
        staleness: d, updates between the parameters and the use of their gradient.
        momentum_lag: l, updates from one step of a momentum to its next: 1 for a server's, as many
            as there are workers where each has its own.
    """

    def limit(angle: Any) -> Any:
        z = np.exp(1j * angle)
        return -(z**staleness) * (z - 1) * (1 - momentum * z**-momentum_lag)

    angles = np.linspace(0, math.pi, _POINTS * (staleness + momentum_lag + 2))[1:]
    sides = np.sign(limit(angles[:-1]).imag)
    found = []
    for n in np.flatnonzero(sides[:-1] != sides[1:]):
        low, high = angles[n], angles[n + 1]
        for _ in range(50):
            middle = (low + high) / 2
            is_left = np.sign(limit(middle).imag) == sides[n]
            low, high = (middle, high) if is_left else (low, middle)
        found.append(float(limit(low).real))
    found.append(float(limit(math.pi).real))
    return min(a for a in found if a > 0)


def stable_fraction(
    momentum: float, staleness: int, num_updates: float, momentum_lag: int = 1
) -> float:
    """Return the stable learning rate over that of synchronous SGD with the same momentum, <= 1.

    Args:
        momentum: and the others: as above.
        staleness: in updates.
        num_updates: that share a global batch: each is made at 1 / ``num_updates`` of the rate.
        momentum_lag: in updates.
    """
    synchronous = 2 * (1 + momentum)
    return min(1.0, num_updates * stable_rate(momentum, staleness, momentum_lag) / synchronous)


def stability_notes(runs: Sequence[RunSnapshot], staleness_median: float) -> tuple[str, ...]:
    """Return the note for repeats with a momentum at which only a small learning rate is stable.

    Args:
        runs: of one strategy; none while one still trains.
        staleness_median: over all their updates.
    """
    run = runs[0]
    if run.spec is None or run.header is None or any(each.is_running for each in runs):
        return ()
    momentum, num_workers = run.header.momentum, run.header.num_workers
    if not momentum or not staleness_median > 0:
        return ()
    try:
        chosen = parse_strategy(run.spec.strategy)
    except UserError:  # of an earlier version
        return ()
    if chosen.name not in ("async", "hogwild") or chosen.options.get("compensate"):
        return ()  # which follow another equation
    lag = num_workers if chosen.name == "hogwild" else 1
    staleness = math.ceil(staleness_median)
    fraction, plain = (stable_fraction(m, staleness, num_workers, lag) for m in (momentum, 0.0))
    if fraction > WORTH_WORDS:
        return ()
    return (
        f"with momentum {momentum:g} and a staleness of {staleness}, {_percent(fraction)} of the "
        "synchronous learning rate is stable; with momentum 0, "
        f"{'all of it' if plain > 0.995 else _percent(plain)}",
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %" if fraction >= 0.01 else "less than 1 %"
