"""How far is the training?  One line.  (Notebook side.)"""

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import final

from ddpnb.reports.formatting import duration, labels, number, percent
from ddpnb.reports.style import style_of
from ddpnb.reports.table import dot
from ddpnb.runs.comparison import Comparison
from ddpnb.runs.model import RunSnapshot
from ddpnb.runs.summary import samples_per_second

BAR = "display:inline-block;width:11em;height:.62em;border-radius:.31em;overflow:hidden;"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of progress, shown as HTML with a bar in a notebook and as text elsewhere."""

    text: str
    share: float
    """How much of the run is done, 0 to 1."""
    colour: str

    def html(self) -> str:
        """Return the line with a bar in the strategy's colour."""
        width = f"{100 * self.share:.1f}%"
        return (
            '<div style="font-variant-numeric:tabular-nums;padding:.25em .2em;white-space:nowrap">'
            f'<span role="progressbar" aria-valuemin="0" aria-valuemax="100" '
            f'aria-valuenow="{100 * self.share:.0f}" '
            f'style="{BAR}background:rgba(128,128,128,.28);margin-right:.8em">'
            f'<span style="display:block;height:100%;width:{width};'
            f'background:{self.colour}"></span></span>'
            f"{dot(self.colour)}{escape(self.text)}</div>"
        )

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html()


def progress_of(comparison: Comparison) -> Progress:
    """Return how far a comparison is: the run that trains, and how many are still to come.

    E.g. ``ddp, repeat 1 of 3: 63 % · 812 samples/s · loss 0.41 | run 2 of 12: 12 s left, about
    2 min 5 s in all``.
    """
    num_planned = max(len(comparison.specs), len(comparison.runs))
    if not comparison.runs:
        first = comparison.strategies[0] if comparison.strategies else "the first run"
        return Progress(text=f"{first}: starting", share=0.0, colour=style_of(first).colour)
    run = comparison.runs[-1]
    share = _share(run)
    told = " · ".join([_what(run, comparison) + f": {_state(run, share)}", *_numbers(run)])
    left = _seconds_left(run, share)
    if num_planned > 1:
        told += f" | run {len(comparison.runs)} of {num_planned}"
        told += f": {duration(left)} left{_in_all(comparison, left)}" if left is not None else ""
    elif left is not None:
        told += f" · {duration(left)} left"
    colour = style_of(run.name, comparison.strategies).colour
    return Progress(text=told, share=share, colour=colour)


def _share(run: RunSnapshot) -> float:
    if not run.is_running:
        return 1.0
    planned = run.header.num_samples if run.header else 0
    return min(run.aggregate.num_samples / planned, 1.0) if planned else 0.0


def _what(run: RunSnapshot, comparison: Comparison) -> str:
    repeats = [spec for spec in comparison.specs if spec.strategy == run.name]
    label = labels(comparison)[run.comparison, run.name]
    return f"{label}, repeat {run.repeat + 1} of {len(repeats)}" if len(repeats) > 1 else label


def _state(run: RunSnapshot, share: float) -> str:
    if not run.is_running:
        return run.status.value
    if run.aggregate.num_events == 0:
        return "warming up" if run.header else "starting"
    return "evaluating" if share >= 1 else percent(share)


def _numbers(run: RunSnapshot) -> list[str]:
    """Return speed and loss, as far as they are known."""
    if run.aggregate.num_events == 0:
        return []
    speed = samples_per_second(run)
    parts = [f"{number(speed)} samples/s"] if math.isfinite(speed) else []
    return [*parts, f"loss {number(run.aggregate.recent_loss)}"]


def _seconds_left(run: RunSnapshot, share: float) -> float | None:
    """Return how long the run that trains will take still; None where that is not known."""
    if run.aggregate.num_events == 0 or not run.is_running or not 0 < share < 1:
        return None
    return run.aggregate.seconds * (1 - share) / share


def _in_all(comparison: Comparison, left: float) -> str:
    """Say about how long all runs will take still, where some are done and some to come.

    One to come takes as long as those of its strategy did, or else as those before it.
    """
    runs, to_come = comparison.runs, comparison.specs[len(comparison.runs) :]
    took: dict[str, list[float]] = {}
    for run, following in pairwise(runs):
        took.setdefault(run.name, []).append(following.created - run.created)
    everyone = [seconds for each in took.values() for seconds in each]
    if not everyone or not to_come:
        return ""
    left += sum(fmean(took.get(spec.strategy, everyone)) for spec in to_come)
    return f", about {duration(left)} in all"
