"""Chooses the number of samples on which a comparison evaluates its models.  Runs in the kernel.

The check of a strategy measures how long evaluation and training take per sample.  Before the first
run, ddpnb chooses one number of samples for all runs, so all models are evaluated on the same
samples.  ddpnb chooses from a few round numbers, so a busy machine hardly changes the choice.  If
all evaluations together take at most two seconds, ddpnb keeps the default numbers.  On emulated
devices, the number of samples is always the same.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from ddpnb.protocol.messages import Checked, RunSpec

SHARE = 0.25
"""Maximum evaluation time, as a share of the training time."""
ALWAYS_SECONDS = 2.0
"""Evaluation time that is always allowed, even if the training is short."""
DEFAULT_SIZES = 10_000, 2_000
"""Default numbers of samples to evaluate: after training, and at each point during training."""
SIZES = (2_000, 1_000, 500, 200, 100)
"""If the default numbers of samples take too long, ddpnb tries these numbers in this order."""


def budgeted(
    specs: Sequence[RunSpec], checked: Collection[Checked], num_ranks: int
) -> tuple[RunSpec, ...]:
    """Reduce evaluations so that together they take at most a quarter of the training time.

    First, use fewer samples.  Then, evaluate less often, unless ``--eval-every`` is given.
    """
    if not specs or not checked or specs[0].eval_samples is not None:
        return tuple(specs)
    spec, one = specs[0], next(iter(checked))
    judging = median(each.seconds_per_judged for each in checked)
    if spec.is_emulated:  # the same samples on fast and slow machines
        return tuple(replace(each, eval_samples=DEFAULT_SIZES[1]) for each in specs)
    training = median(each.seconds_per_trained or 3 * judging for each in checked)
    seconds = training * spec.num_epochs * one.num_samples / num_ranks
    num_affordable = max(ALWAYS_SECONDS, SHARE * seconds) / judging if judging > 0 else math.inf
    num_points = _num_points(spec)

    def num_judged(last: int, each: int) -> int:
        ends = min(last, one.num_held_out) + min(last, one.num_samples)
        return ends + num_points * min(each, one.num_held_out)

    if num_judged(*DEFAULT_SIZES) <= num_affordable:
        return tuple(specs)
    size = next((n for n in SIZES if num_judged(n, n) <= num_affordable), SIZES[-1])
    if num_judged(size, size) > num_affordable and spec.eval_every is None:
        num_points = min(num_points, max(0, int(num_affordable / size) - 2))
    num = min(size, one.num_held_out)
    note = (
        f"Models were evaluated {num_points + 1} times on {num:,} of {one.num_held_out:,} held-out "
        "samples, so that evaluation takes at most a quarter of the training time. To evaluate on "
        "N samples, use --eval-samples N."
    )
    return tuple(
        replace(each, eval_samples=size, num_points=num_points + 1, notes=(*each.notes, note))
        for each in specs
    )


def _num_points(spec: RunSpec) -> int:
    """Return the number of evaluations before the end of training."""
    if spec.eval_every is None:
        return spec.num_points - 1
    return math.ceil(spec.num_epochs / spec.eval_every) - 1 if spec.eval_every else 0
