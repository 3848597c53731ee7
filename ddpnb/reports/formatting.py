"""Formats numbers, and builds the titles and notes of comparisons.  Runs in the kernel."""

import math
from collections.abc import Sequence

from ddpnb.protocol.catalogue import CELL_TASK, Style
from ddpnb.protocol.messages import RunSpec
from ddpnb.protocol.options import options_of
from ddpnb.protocol.training_options import TrainingSpec
from ddpnb.reports.style import style_of
from ddpnb.results.comparison import Comparison, body_of
from ddpnb.results.frames import SHORT_SECONDS, Row
from ddpnb.results.run import RunSnapshot, Status
from ddpnb.results.tuning import has_diverged, tried

NOTHING = "–"
"""The text that tables show instead of an unknown number."""
MACHINE = ("torch", "CPU", "ranks", "hosts", "GPUs", "threads of each rank", "backend")
"""Keys of ``Comparison.environment`` that affect the measured times."""


def number(value: float, digits: int = 3) -> str:
    """Return a number with about ``digits`` significant digits, e.g. ``12,345`` or ``3.00e-08``."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    rounded = abs(float(f"{value:.{digits}g}"))
    decimals = digits - 1 - math.floor(math.log10(rounded))
    return f"{value:.{decimals}f}" if decimals < digits + 4 else f"{value:.{digits - 1}e}"


def plain(value: float) -> str:
    """Return a setting such as a learning rate as users write it, e.g. ``0.05``."""
    return NOTHING if math.isnan(value) else f"{value:g}"


def short(value: float) -> str:
    """Return a number in a short form with a unit prefix, e.g. ``17.1k``."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{number(value / unit)}{letter}"
    return number(value)


def tick(value: float) -> str:
    """Return the label of an axis tick: the result of ``short`` without trailing zeros."""
    text = short(value)
    number, unit = (text[:-1], text[-1]) if text[-1] in "kMGT" else (text, "")
    is_short = "." in number and "e" not in number
    return (number.rstrip("0").rstrip(".") if is_short else number) + unit


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, e.g. ``4.6 MB``."""
    if not math.isfinite(num_bytes):
        return NOTHING
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * unit:
            return f"{number(num_bytes / unit, 2)} {name}"
    return f"{num_bytes:.0f} B"


def percent(share: float, decimals: int = 0) -> str:
    """Return a share (0.961) as a percentage (``96.1 %``)."""
    return f"{100 * share:.{decimals}f} %" if math.isfinite(share) else number(share)


def duration(seconds: float) -> str:
    """Return a time span, rounded to seconds, e.g. ``12 s`` or ``3 min 20 s``."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def in_units(seconds: float) -> str:
    """Return a time in s, ms or µs, e.g. ``12.5 ms``."""
    scale, unit = time_unit(seconds)
    return f"{number(seconds * scale)} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose s, ms or µs for a time.  Return the factor from seconds, and the name of the unit."""
    if seconds >= 10:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def counted(num: float, noun: str) -> str:
    """Return a number and a noun, e.g. ``1 worker`` or ``1.5 workers``."""
    return f"{num:.12g} {noun}" if num == 1 else f"{num:.12g} {noun}s"


def styles(comparison: Comparison, strategies: Sequence[Row]) -> list[Style]:
    """Return the style of each strategy.  The second comparison has darker colours than the first.

    The markers of emulated strategies are hollow.  The markers of variants are hollow too.
    """
    several = list(dict.fromkeys(each["comparison"] for each in strategies))
    made = []
    for each in strategies:
        shade = several.index(each["comparison"])
        style = style_of(each["strategy"], comparison.strategies, shade)
        made.append(style._replace(is_hollow=style.is_hollow or each["is_emulated"]))
    return made


def title(comparison: Comparison) -> str:
    """Return the title of a comparison: its name, task, global batch, workers and devices."""
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    headers = [run.header for run in comparison.runs if run.header]
    tasks = dict.fromkeys("own cell" if s.task == "cell" else s.task for s in specs)
    batches = dict.fromkeys(s.batch_words for s in specs)
    devices = dict.fromkeys(header.device.split(":")[0] for header in headers)
    parts = [" and ".join(tasks)]
    parts += [f"global batch {' and '.join(batches)}"] if batches else []
    nums = {len(s.rates) for s in specs if not s.is_ceiling}
    if len(nums) == 1 and nums != {0}:
        parts.append(f"best of {nums.pop()} lr")
    num_repeats = max((run.repeat for run in comparison.runs), default=0) + 1
    parts += [f"{num_repeats} repeats"] if num_repeats > 1 else []
    emulated = emulated_devices(comparison)
    if headers and not emulated:
        workers = counted(max(header.num_workers for header in headers), "worker")
        hosts = comparison.environment.get("hosts", "")
        of_hosts = f" of {len(hosts.split(','))} hosts" if hosts else ""
        parts.append(f"{workers} on {' and '.join(devices)}{of_hosts}")
    parts += [f"{emulated}; losses are real"] if emulated else []
    text = ", ".join(part for part in parts if part)
    return f"{comparison.name}: {text}" if text else comparison.name


def emulated_devices(comparison: Comparison) -> str:
    """Return the emulated devices, e.g. ``"8 emulated V100"``, or ``""`` if time was measured."""
    specs = [run.spec for run in comparison.runs if run.spec] or list(comparison.specs)
    found = dict.fromkeys(each.text for spec in specs if (each := spec.emulated))
    return " and ".join(found)


def notes(comparison: Comparison, strategies: Sequence[Row]) -> tuple[str, ...]:
    """Return the notes below a table, on different settings, failures, emulation, short runs."""
    labels: dict[str, list[str]] = {}
    for row in strategies:
        for note in row["notes"]:
            labels.setdefault(note, []).append(row["label"])
    specs = [run.spec for run in comparison.runs if run.spec]
    differing = [*differences(specs), *(key for key in MACHINE if key in comparison.differing)]
    found = [f"these runs differ in {listed(differing)}"] if differing else []
    found += [
        note if len(names) == len(strategies) > 1 else f"{', '.join(names)}: {note}"
        for note, names in labels.items()
    ]
    if groups := tried(comparison.all_runs):
        each = [f"{name} {', '.join(map(_at_rate, runs))}" for (_, name), runs in groups.items()]
        found.append(f"held-out loss by lr: {'; '.join(each)}")
        found.append(
            "held-out scores leave out repeat 1, because its held-out loss chose the lr"
            if any(row["num_scored"] < row["num_runs"] for row in strategies)
            else "the held-out samples chose the lr, so held-out scores look too good"
        )
    if short_ones := [row["label"] for row in strategies if row["is_short"]]:
        which = "the runs" if len(short_ones) == len(strategies) else listed(short_ones)
        found.append(
            f"{which} took less than {SHORT_SECONDS:g} s, which is too short to time well. "
            f"Add --min-seconds {SHORT_SECONDS:g} for longer runs"
        )
    return tuple(found)


def differences(specs: Sequence[RunSpec]) -> list[str]:
    """Return the names of the options that differ between runs, as the magics spell them."""
    specs = [spec for spec in specs if not spec.is_ceiling]
    differing = [
        option.keyword.replace("_", " ")
        for name, option in options_of(TrainingSpec).items()
        if len({_choice(spec, name) for spec in specs}) > 1
    ]
    cells = {body_of(spec.source).strip() for spec in specs if spec.task == CELL_TASK}
    return differing + (["the cell's code"] if len(cells) > 1 else [])


def _at_rate(run: RunSnapshot) -> str:
    """Return a run's learning rate and held-out loss: ``0.05: 0.31`` or ``0.05: diverged``."""
    rate = f"{run.spec.learning_rate:g}" if run.spec else NOTHING
    if run.status is not Status.FINISHED:
        return f"{rate}: {run.status.value}"
    return f"{rate}: {'diverged' if has_diverged(run) else number(run.reported('held_out_loss'))}"


def listed(parts: Sequence[str]) -> str:
    """Return the parts as a list in words: ``"a, b and c"``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _choice(spec: RunSpec, name: str) -> object:
    value = getattr(spec, name)
    if name == "seed":  # because each repeat has a different seed
        return spec.data_seed
    if name == "learning_rate" and spec.rates:  # because each strategy uses its best rate
        return spec.rates
    return value
