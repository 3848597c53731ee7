"""Parses the short notations that users write; raises UserError for invalid text.

ddp:hook=fp16,bucket_cap_mb=5   a strategy or a task, with options
0,2-3                           ranks
1:3x                            rank 1 takes 3 times as long to compute
1:50ms                          each step of rank 1 takes 50 ms longer; also 1:0.05s
1@5s                            ddpnb kills rank 1 after 5 seconds of training; also 1@500ms
1Gbit,0.5ms                     a link's rate and latency; also 12GB/s,10us, or a name in ``LINKS``
accuracy=0.95                   a target accuracy on held-out samples; also accuracy=95%
0.3                             a target training loss
178ms/64                        a step of 178 ms for 64 samples
4MB                             a number of bytes; also 4MiB, 4096

``parse_quantity`` parses every number that has a unit.  Used in every process.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError, advice, closest, one_of

# -- strategies and tasks ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy or task with the options that the user chose."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_strategy(text: str) -> Choice:
    """Return the strategy that a string names.

    A name that begins with a capital letter is a class of the user.  Only the ranks know whether
    the class exists and which options the class takes.
    """
    if text[:1].isupper() and text.split(":")[0].isidentifier():
        name, given = _split(text)
        return Choice(name=name, options={key: _guess(value) for key, value in given.items()})
    return _parse("strategy", text, STRATEGIES)


def parse_task(text: str) -> Choice:
    """Return the task that a string names."""
    return Choice(name=CELL_TASK) if text == CELL_TASK else _parse("task", text, TASKS)


def _parse(kind: str, text: str, entries: Mapping[str, Entry]) -> Choice:
    name, given = _split(text)
    if name not in entries:
        raise one_of(kind, name, entries)
    options = entries[name].options
    for key in given:
        if not options:
            raise UserError(f"{name} has no options. Remove {key!r}.")
        if key not in options:
            raise UserError(f"{name} has no option {key!r}; {advice(key, options)}")
    return Choice(
        name=name,
        options={key: options[key].read(f"{name}:{key}", value) for key, value in given.items()},
    )


def _split(text: str) -> tuple[str, dict[str, str]]:
    name, colon, rest = text.partition(":")
    pairs = [word.partition("=") for word in rest.split(",")] if colon else []
    if any(not key or not equals for key, equals, _ in pairs):
        raise UserError(f"Write options as {name}:option=value,option=value, not {text}.")
    given = {key: value for key, _, value in pairs}
    if len(given) < len(pairs):
        raise UserError(f"{text} sets an option twice. Remove one of the two values.")
    return name, given


def _guess(text: str) -> bool | int | float | str:
    """Return the value of an option of a user's class.  The type is guessed from the string."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"on": True, "off": False}.get(text, text)


# -- ranks ---------------------------------------------------------------------------------


def parse_ranks(text: str | None, world_size: int) -> tuple[int, ...]:
    """Parse a set of ranks such as ``"0,2-3"``; ``None`` means all ranks."""
    if text is None or text.strip() in ("", "all"):
        return tuple(range(world_size))
    ranks: set[int] = set()
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        try:
            numbers = range(int(first), int(last or first) + 1)
            ranks |= set(numbers[:1000])  # a typing error may name millions of ranks
        except ValueError:
            raise UserError(
                f"{text!r} does not name ranks. Write numbers and ranges, such as 0,2-3."
            ) from None
    if not ranks:
        raise UserError(f"{text!r} is an empty range. Write the smaller number first, as in 0-3.")
    if missing := sorted(rank for rank in ranks if rank >= world_size):
        raise UserError(
            f"There is no rank {format_ranks(missing)}. The ranks are "
            f"{format_ranks(range(world_size))}."
        )
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a set of ranks in the short notation: ``"0,2-3"``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ",".join("-".join(map(str, span)) for span in spans)


def spoken_ranks(ranks: Collection[int]) -> str:
    """Return a set of ranks in words, for a sentence: ``"rank 1"``, ``"ranks 0,2-3"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


# -- numbers and units ---------------------------------------------------------------------

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([A-Za-z/%]*)\s*")

TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHARES = {"": 1.0, "%": 0.01}
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
BYTES = {f"{size}{b}": num for size, num in _THOUSANDS.items() for b in ("", "b")}
_BIT_RATES = {f"{size}bit{s}": _THOUSANDS[size] for size in ("", "k", "m", "g") for s in ("", "/s")}
RATES = _BIT_RATES | {"kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}
"""Units of rates, in bits per second.  Units with ``bit`` may be in upper or lower case."""


def parse_quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number times its unit, such as 0.0005 for ``"0.5ms"``; NaN if there is no match."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return math.nan
    number, size = float(found[1]), units.get(found[2], units.get(found[2].lower(), math.nan))
    return number / round(1 / size) if size < 1 else number * size  # 95% is 0.95 exactly


def parse_share(name: str, text: str) -> float:
    """Parse ``20%`` or ``0.2``."""
    share = parse_quantity(text, SHARES)
    if not math.isfinite(share):
        raise UserError(f"{name} must be a share, such as 20% or 0.2, not {text}.")
    if share > 1 and "%" not in text:
        advised = f"Write {share:g}% or {share / 100:g}"
        raise UserError(f"{name} {text} would mean {100 * share:g} %. {advised}.")
    return share


def parse_size(name: str, text: str) -> int:
    """Parse a number of bytes: ``4096``, ``64kB``, ``4MB``, ``1MiB``."""
    size = parse_quantity(text, BYTES)
    if not size >= 1:
        raise UserError(f"{name} must be a number of bytes, such as 4096 or 4MB, not {text}.")
    return int(size)


# -- faults on purpose ---------------------------------------------------------------------

MAX_SECONDS = 86_400.0
"""The maximum number of seconds that a fault may specify: one day."""
MAX_FACTOR = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A fault that makes every step of one rank longer."""

    rank: int
    factor: float = 1.0
    seconds: float = 0.0
    text: str
    """The description for users: ``"3x slower"``."""


def parse_slow(texts: Iterable[str]) -> tuple[Slow, ...]:
    """Parse strings such as ``1:3x`` or ``1:50ms``."""
    return tuple(map(_parse_slow, texts))


def _parse_slow(text: str) -> Slow:
    rank, _, amount = text.partition(":")
    factor, seconds = parse_quantity(amount, {"x": 1.0}), parse_quantity(amount, TIME_UNITS)
    if rank.isdecimal() and 1 < factor <= MAX_FACTOR:
        return Slow(rank=int(rank), factor=factor, text=f"{factor:g}x slower")
    if rank.isdecimal() and 0 < seconds <= MAX_SECONDS:
        return Slow(rank=int(rank), seconds=seconds, text=f"{1e3 * seconds:g} ms slower")
    raise UserError(
        f"--slow {text} is not valid. Write a rank and a factor, such as 1:3x, or a rank and a "
        f"time per step, such as 1:50ms. The factor must be more than 1 and at most "
        f"{MAX_FACTOR:g}, and the time at most a day."
    )


def parse_kills(texts: Iterable[str]) -> dict[int, float]:
    """Parse strings such as ``1@5s``; return the training seconds until the kill, by rank."""
    kills: dict[int, float] = {}
    for text in texts:
        rank, _, amount = text.partition("@")
        seconds = parse_quantity(amount, TIME_UNITS)
        if not (rank.isdecimal() and 0 <= seconds <= MAX_SECONDS):
            raise UserError(f"--kill {text} is not valid. Write a rank and a time, such as 1@5s.")
        if int(rank) in kills:
            raise UserError(f"--kill names rank {rank} twice. Write each rank once.")
        kills[int(rank)] = seconds
    return kills


# -- an emulated network -------------------------------------------------------------------

MAX_LATENCY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A rank's link to all other ranks.  Both directions have the full rate at the same time."""

    bits_per_second: float
    latency_seconds: float

    @property
    def text(self) -> str:
        """The description for users: ``"1 Gbit/s and 0.5 ms"``."""
        size, unit = (1e9, "Gbit/s") if self.bits_per_second >= 1e9 else (1e6, "Mbit/s")
        rate = f"{self.bits_per_second / size:g} {unit}"
        return f"{rate} and {1e3 * self.latency_seconds:g} ms"


def _gigabits(rate: float, microseconds: float) -> LinkSpec:
    return LinkSpec(bits_per_second=rate * 1e9, latency_seconds=microseconds * 1e-6)


LINKS: Mapping[str, LinkSpec] = {
    "wifi": _gigabits(0.2, 2000),
    "1GbE": _gigabits(0.94, 50),
    "10GbE": _gigabits(9.4, 46),
    "25GbE": _gigabits(13.6, 46),
    "100GbE": _gigabits(40, 46),
    "InfiniBand-EDR": _gigabits(96, 9.6),
    "InfiniBand-HDR": _gigabits(200, 5),
    "InfiniBand-NDR": _gigabits(400, 5),
    "pcie3": _gigabits(80, 5.7),
    "pcie4": _gigabits(200, 10),
    "pcie5": _gigabits(400, 10),
    "NVLink-V100": _gigabits(960, 3.4),
    "NVLink-A100": _gigabits(1840, 3.4),
    "NVLink-H100": _gigabits(2880, 3.4),
}
"""Typical links by name.  ``docs/emulated-devices.md`` lists the source of each value."""


def slower_of(first: LinkSpec, second: LinkSpec) -> LinkSpec:
    """Return a link with the lower rate and the longer latency of two links."""
    return LinkSpec(
        bits_per_second=min(first.bits_per_second, second.bits_per_second),
        latency_seconds=max(first.latency_seconds, second.latency_seconds),
    )


def parse_link(text: str) -> LinkSpec:
    """Parse ``1Gbit,0.5ms``, ``12GB/s,10us`` or a name in ``LINKS``."""
    text = text.replace(" ", "")
    if text in LINKS:
        return LINKS[text]
    first, _, second = text.partition(",")
    rate, latency = parse_quantity(first, RATES), parse_quantity(second, TIME_UNITS)
    if not (rate > 0 and 0 <= latency <= MAX_LATENCY_SECONDS):
        named = closest(text, LINKS) or f"one of {', '.join(LINKS)}"
        raise UserError(
            f"There is no link {text!r}. Write a rate and a latency (1Gbit,0.5ms), or {named}."
        )
    return LinkSpec(bits_per_second=rate, latency_seconds=latency)


# -- targets -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The loss or accuracy that a run should reach."""

    value: float
    is_accuracy: bool = False
    """True if the value is a held-out accuracy; False if it is a training loss."""

    @property
    def text(self) -> str:
        """The description for users: ``"loss 0.3"``, ``"95 % held-out accuracy"``."""
        if self.is_accuracy:
            return f"{100 * self.value:.4g} % held-out accuracy"
        return f"loss {self.value:g}"


def parse_target(option: str, given: str) -> Target:
    """Parse ``0.3``, ``accuracy=0.95`` or ``accuracy=95%``."""
    name, equals, number = given.rpartition("=")
    is_accuracy = name.strip() == "accuracy"
    value = parse_quantity(number, SHARES if is_accuracy else {"": 1.0})
    is_known = 0 < value <= 1 if is_accuracy else math.isfinite(value) and not equals
    if not is_known:
        raise UserError(
            f"{option} must be a training loss, such as 0.3, or a held-out accuracy, such as "
            f"accuracy=0.95, not {given}."
        )
    return Target(value=value, is_accuracy=is_accuracy)
