"""The notes that tables show for a strategy, for example on unstable momentum.  Runs in the kernel.

Asynchronous SGD has one server, momentum m, and N workers.  Gradients have weight 1/N and staleness
d.  Near a minimum, a coordinate w along a direction of curvature h follows this recurrence:

    w(t+1)  =  w(t) + m (w(t) - w(t-1)) - a w(t-d),     a = (lr / N) h

``docs/staleness.md`` derives the largest stable ``a``, and a test checks the derivation.
"""

import contextlib
import math
from collections.abc import Sequence

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Mark
from ddpnb.protocol.notation import parse_strategy
from ddpnb.results.run import RunSnapshot, Status, ending

WORTH_WORDS = 0.5
"""ddpnb adds a note if ``stable_fraction`` is at most this number."""


def notes_of(
    runs: Sequence[RunSnapshot], counted: Sequence[RunSnapshot], staleness: float
) -> tuple[str, ...]:
    """Return the notes on emulation, failures, faults, diverged losses and momentum, each once.

    Args:
        runs: the repeats of a strategy.
        counted: the repeats from which the strategy's numbers are computed.
        staleness: the median staleness over the updates of ``counted``; NaN if unknown.
    """
    notes = [note for run in runs for note in run.notes]
    for run in runs:
        if run.status not in (Status.RUNNING, Status.FINISHED) or run.detail:
            notes.append(ending(run.status, run.detail))
    diverged = sum(run.num_diverged for run in runs)
    notes += [_described(mark, run) for run in runs for mark in run.marks if mark.seconds > 0]
    if diverged:
        notes.append(f"{diverged} {'loss was' if diverged == 1 else 'losses were'} NaN or infinite")
    return (*dict.fromkeys(notes), *_on_momentum(counted, staleness))


def _described(mark: Mark, run: RunSnapshot) -> str:
    """Return the note on a mark, such as the death of a rank."""
    text = f"rank {mark.rank} {mark.text} at {mark.seconds:.1f} s"
    on_purpose = () if run.spec is None else run.spec.kill
    if mark.kind.is_death and not any(kill.startswith(f"{mark.rank}@") for kill in on_purpose):
        return f"{text}; the results may lack the steps of this rank's last half second"
    return text


def _on_momentum(runs: Sequence[RunSnapshot], staleness: float) -> tuple[str, ...]:
    """Return a note if the momentum is stable only with small learning rates."""
    spec, header = runs[0].spec, runs[0].header
    if spec is None or header is None or any(run.is_running for run in runs):
        return ()
    with contextlib.suppress(UserError):  # this version may reject a stored strategy
        chosen = parse_strategy(spec.strategy)
        is_plain = chosen.name == "async" and not chosen.options.get("compensate")
        if is_plain and header.momentum and staleness > 0:
            momentum, late, num = header.momentum, math.ceil(staleness), header.num_workers
            own, plain = (stable_fraction(each, late, num) for each in (momentum, 0.0))
            if own <= WORTH_WORDS:
                return (
                    f"at momentum {momentum:g} and staleness {late}, training is stable only up to "
                    f"{100 * own:.0f} % of the synchronous learning rate; "
                    f"at momentum 0, up to {100 * plain:.0f} %",
                )
    return ()


def stable_rate(momentum: float, staleness: int) -> float:
    """Return the largest stable ``a``.  Bisection finds the angle of a root with magnitude 1."""
    low, high = 0.0, math.pi
    for _ in range(60):
        t = (low + high) / 2
        turned = math.atan2(momentum * math.sin(t), 1 - momentum * math.cos(t))
        low, high = (t, high) if (staleness + 0.5) * t + turned < math.pi / 2 else (low, t)
    return 2 * math.sin(low / 2) * math.sqrt(1 - 2 * momentum * math.cos(low) + momentum**2)


def stable_fraction(momentum: float, staleness: int, num_workers: int) -> float:
    """Return async's largest stable learning rate, divided by synchronous SGD's (at most 1)."""
    return min(1.0, num_workers * stable_rate(momentum, staleness) / (2 * (1 + momentum)))
