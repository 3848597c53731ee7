"""How large a learning rate is stable where gradients are stale?  (Kernel.)

Near a minimum along a direction of curvature h, a coordinate of asynchronous SGD with one server,
momentum m, N workers of weight 1/N and a staleness of d follows

    w(t+1)  =  w(t) + m (w(t) - w(t-1)) - a w(t-d),     a = (lr / N) h

``docs/comparison-method.md`` derives the limit of a; a test compares it with the recurrence itself.
"""

import math

WORTH_WORDS = 0.5
"""The largest fraction of the synchronous learning rate that has a note."""


def stable_rate(momentum: float, staleness: int) -> float:
    """Return the limit of a, by bisection for the angle at which a root reaches the unit circle."""
    low, high = 0.0, math.pi
    for _ in range(60):
        t = (low + high) / 2
        turned = math.atan2(momentum * math.sin(t), 1 - momentum * math.cos(t))
        low, high = (t, high) if (staleness + 0.5) * t + turned < math.pi / 2 else (low, t)
    return 2 * math.sin(low / 2) * math.sqrt(1 - 2 * momentum * math.cos(low) + momentum**2)


def stable_fraction(momentum: float, staleness: int, num_workers: int) -> float:
    """Return the stable learning rate over that of synchronous SGD with the same momentum, <= 1."""
    return min(1.0, num_workers * stable_rate(momentum, staleness) / (2 * (1 + momentum)))


def stability_note(momentum: float, staleness: int, num_workers: int) -> str:
    """Return the note for a momentum at which only a small learning rate is stable, or nothing."""
    fraction = stable_fraction(momentum, staleness, num_workers)
    if fraction > WORTH_WORDS:
        return ""
    plain = stable_fraction(0.0, staleness, num_workers)
    return (
        f"with momentum {momentum:g} and a staleness of {staleness}, {100 * fraction:.0f} % of "
        f"the synchronous learning rate is stable; with momentum 0, {100 * plain:.0f} %"
    )
