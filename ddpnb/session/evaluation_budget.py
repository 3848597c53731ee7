"""How many samples are a comparison's models judged on, so that it takes little time?  (Kernel.)

The check measures what judging one sample takes, and what training on one takes a worker.  From
these and the planned samples follows, before the first run, one number for all runs: they are
judged on the same samples.  The number is one of a few round ones, so that it hardly depends on how
busy the machine is.  A short training of a small model is judged on everything.  On emulated
devices it is always the same number.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from ddpnb.protocol.messages import Checked, RunSpec

SHARE = 0.25
"""The most that evaluation takes, as a share of the training time that it accompanies."""
FREE_SECONDS = 2.0
"""An evaluation may take as long in any case."""
DEFAULT_SIZES = 10_000, 2_000
"""Samples that the trained model, and each earlier point of its curve, are judged on by default."""
SIZES = (2_000, 1_000, 500, 200, 100)
"""Samples for both where that takes too long."""


def budgeted(
    specs: Sequence[RunSpec], checked: Collection[Checked], num_ranks: int
) -> tuple[RunSpec, ...]:
    """Return trainings whose models are judged in a quarter of the training time.

    First on fewer samples, then at fewer moments where the user has not said how many.
    """
    if not specs or not checked or specs[0].eval_samples is not None:
        return tuple(specs)
    spec, one = specs[0], next(iter(checked))
    judging = median(each.seconds_per_judged for each in checked)
    if spec.is_emulated:  # the same samples on every machine, however fast
        return tuple(replace(each, eval_samples=DEFAULT_SIZES[1]) for each in specs)
    training = median(each.seconds_per_trained or 3 * judging for each in checked)
    seconds = training * spec.num_epochs * one.num_samples / num_ranks
    num_affordable = max(FREE_SECONDS, SHARE * seconds) / judging if judging > 0 else math.inf
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
        f"Judged on {num:,} of {one.num_held_out:,} held-out samples, at {num_points + 1} moments: "
        "so it takes about a quarter of the training time. --eval-samples sets how many."
    )
    return tuple(
        replace(each, eval_samples=size, num_points=num_points + 1, notes=(*each.notes, note))
        for each in specs
    )


def _num_points(spec: RunSpec) -> int:
    """Return how often a model is judged before it is trained."""
    if spec.eval_every is None:
        return spec.num_points - 1
    return math.ceil(spec.num_epochs / spec.eval_every) - 1 if spec.eval_every else 0
