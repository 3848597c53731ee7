"""The progress of a comparison in one line.  Runs in the kernel."""

import math
from dataclasses import dataclass
from html import escape
from typing import final

from ddpnb.reports.formatting import duration, number, percent
from ddpnb.reports.style import style_of
from ddpnb.reports.table import QUIET, dot
from ddpnb.results.comparison import Comparison
from ddpnb.results.curve import end_of
from ddpnb.results.run import RunSnapshot


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of progress.  A notebook shows HTML with a bar; a terminal shows text."""

    text: str
    share: float
    """The part of the run that is finished, from 0 to 1."""
    colour: str
    quiet: str = ""
    """A faint text that a notebook shows below the line."""

    def html(self) -> str:
        """Return the bar, the line, and below it the text ``quiet``."""
        return (
            '<div style="font-variant-numeric:tabular-nums;padding:.25em .2em;white-space:nowrap">'
            f'<progress value="{self.share:.3f}" style="width:11em;margin-right:.8em"></progress>'
            f"{dot(self.colour)}{escape(self.text)}"
            f'<div style="{QUIET}">{escape(self.quiet)}</div></div>'
        )

    def __repr__(self) -> str:
        return self.text

    _repr_html_ = html


def progress_of(comparison: Comparison, quiet: str = "") -> Progress:
    """Return the progress of the current run, and of the whole comparison.

    Example: ``ddp, repeat 1 of 3: 63 % · 812 samples/s · loss 0.41 | run 2 of 12: 12 s left,
    about 2 min 5 s in all``.
    """
    runs = comparison.all_runs
    num_planned = max(len(comparison.specs), len(runs))
    if not runs:
        first = comparison.strategies[0] if comparison.strategies else "the first run"
        return Progress(
            text=f"{first}: starting", share=0.0, colour=style_of(first).colour, quiet=quiet
        )
    run = runs[-1]
    share = _share(run)
    text = " · ".join([_what(run, comparison) + f": {_state(run, share)}", *_numbers(run)])
    left = _seconds_left(run, share)
    if num_planned > 1:
        text += f" | run {len(runs)} of {num_planned}"
        text += f": {duration(left)} left{_in_all(comparison, left)}" if left is not None else ""
    elif left is not None:
        text += f" · {duration(left)} left"
    colour = style_of(run.name, comparison.strategies).colour
    return Progress(text=text, share=share, colour=colour, quiet=quiet)


def _share(run: RunSnapshot) -> float:
    if not run.is_running:
        return 1.0
    if (judged := run.evaluating) is not None:
        return judged.num_done / judged.num_all
    planned = run.header.num_samples if run.header else 0
    return min(run.num_samples / planned, 1.0) if planned else 0.0


def _what(run: RunSnapshot, comparison: Comparison) -> str:
    num = max((s.repeat + 1 for s in comparison.specs if s.strategy == run.name), default=1)
    label = run.name + " (emulated)" * bool(run.header and run.header.is_emulated)
    label += f" at lr {run.spec.learning_rate:g}" if run.spec and run.spec.rates else ""
    return f"{label}, repeat {run.repeat + 1} of {num}" if num > 1 else label


def _state(run: RunSnapshot, share: float) -> str:
    if not run.is_running:
        return run.status.value
    if run.num_events == 0:
        return "warming up" if run.header else "starting"
    if (judged := run.evaluating) is not None:
        return f"evaluating {judged.num_done + 1} of {judged.num_all}"
    return "evaluating" if share >= 1 else percent(share)


def _numbers(run: RunSnapshot) -> list[str]:
    """Return a text with the speed and a text with the loss.  Leave out unknown values."""
    if run.num_events == 0 or (run.evaluating is not None and run.is_running):
        return []
    speed = run.samples_per_second
    parts = [f"{number(speed)} samples/s"] if math.isfinite(speed) else []
    return [*parts, f"loss {number(end_of(run.curve))}"]


def _seconds_left(run: RunSnapshot, share: float) -> float | None:
    """Return the remaining seconds of the current run, or None if they are unknown."""
    if run.num_events == 0 or not run.is_running or not 0 < share < 1:
        return None
    seconds = run.evaluating.seconds if run.evaluating else run.seconds
    return seconds * (1 - share) / share


def _in_all(comparison: Comparison, left: float) -> str:
    """Return the remaining time of all runs, estimated from the time of earlier runs."""
    runs, num_to_come = comparison.all_runs, len(comparison.specs) - len(comparison.all_runs)
    if len(runs) < 2 or num_to_come <= 0:
        return ""
    seconds = (runs[-1].created - runs[0].created) / (len(runs) - 1)
    return f", about {duration(left + num_to_come * seconds)} in all"
