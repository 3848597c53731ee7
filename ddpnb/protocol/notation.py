"""The short notations that users write; a text that does not fit is a UserError.  (Every process.)

ddp:hook=fp16,bucket_cap_mb=5   a strategy or a task, with options
0,2-3                           ranks
1:3x                            rank 1 computes 3 times as long
1:50ms                          each step of rank 1 takes 50 ms longer; also 1:0.05s
1@5s                            rank 1 is killed after 5 seconds of training; also 1@500ms
1Gbit,0.5ms                     a link of this rate and latency; or one of ``LINKS``
accuracy=0.95                   a target on held-out samples; also 95%.  0.3: a training loss
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpnb.protocol.catalogue import CELL_TASK, REMOVED, STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError, advice, closest, one_of
from ddpnb.protocol.options import Value

# -- strategies and tasks ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy or task, and the options that the user gave it."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)


def parse_strategy(text: str) -> Choice:
    """Return the strategy that a text names.

    A name that begins with a capital letter is the user's own class.  Only the ranks know
    whether it exists and which options it takes.
    """
    if text[:1].isupper() and text.split(":")[0].isidentifier():
        name, given = _split(text)
        return Choice(name=name, options={key: _guess(value) for key, value in given.items()})
    return _parse("strategy", text, STRATEGIES)


def parse_task(text: str) -> Choice:
    """Return the task that a text names."""
    return Choice(name=CELL_TASK) if text == CELL_TASK else _parse("task", text, TASKS)


def _parse(kind: str, text: str, entries: Mapping[str, Entry]) -> Choice:
    name, given = _split(text)
    if name in REMOVED and entries is STRATEGIES:
        raise UserError(f"{name} is gone: take {REMOVED[name]}.")
    if name not in entries:
        raise one_of(kind, name, entries)
    options = entries[name].options
    for key in given:
        if not options:
            raise UserError(f"{name} has no options, but was given {key}.")
        if key not in options:
            raise UserError(f"{name} has no option {key!r}; {advice(key, options)}")
    return Choice(
        name=name,
        options={key: options[key].read(f"{name}:{key}", value) for key, value in given.items()},
    )


def _split(text: str) -> tuple[str, dict[str, str]]:
    name, colon, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if colon else []
    if any(not key or not equals for key, equals, _ in pairs):
        raise UserError(f"Write options as {name}:option=value,option=value, not {text}.")
    given = {key: value for key, _, value in pairs}
    if len(given) < len(pairs):
        raise UserError(f"{text} gives an option twice: leave one of them out.")
    return name, given


def _guess(text: str) -> Value:
    """Return the value of an option of the user's own class, by its spelling."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"on": True, "off": False}.get(text, text)


# -- ranks ---------------------------------------------------------------------------------


def parse_ranks(text: str | None, world_size: int) -> tuple[int, ...]:
    """Parse a set of ranks such as ``"0,2-3"``; ``None`` means all."""
    if text is None or text.strip() in ("", "all"):
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            ranks |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise UserError(
                f"{text!r} does not name ranks: write numbers and ranges, such as 0,2-3."
            ) from None
    if not ranks:
        raise UserError(f"{text!r} names no rank: write the smaller number first, such as 0-3.")
    if missing := sorted(rank for rank in ranks if rank >= world_size):
        raise UserError(
            f"There is no rank {format_ranks(missing)}: the ranks are "
            f"{format_ranks(range(world_size))}."
        )
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a set of ranks in the short form: ``"0,2-3"``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def spoken_ranks(ranks: Collection[int]) -> str:
    """Return a set of ranks for a sentence: ``"rank 1"``, ``"ranks 0,2-3"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


# -- faults on purpose ---------------------------------------------------------------------

_SLOW = re.compile(r"(\d+):(\d+(?:\.\d+)?)(x|ms|s)")
_KILL = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(ms|s)")
_UNIT_SECONDS = {"s": 1.0, "ms": 1e-3}

MAX_SECONDS = 86_400.0
"""A day."""
MAX_FACTOR = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Makes the steps of one rank take longer."""

    rank: int
    factor: float = 1.0
    """On the time that it computes."""
    seconds: float = 0.0
    """Added to each step."""
    text: str
    """For users: ``"3x slower"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kills one rank."""

    rank: int
    seconds: float
    """Of training, before it is killed."""


def parse_slow(text: str) -> Slow:
    """Parse ``1:3x`` or ``1:50ms``."""
    found = _SLOW.fullmatch(text)
    if found is None:
        raise UserError(f"Write --slow as 1:3x or 1:50ms, rank and how slow, not {text!r}.")
    rank, amount, unit = int(found[1]), float(found[2]), found[3]
    if unit != "x":
        seconds = _seconds(f"--slow {text}", amount, unit)
        if seconds == 0:
            raise UserError(f"--slow {text}: that is not slower, give more than 0 {unit}.")
        return Slow(rank=rank, seconds=seconds, text=f"{amount:g} {unit} slower")
    if amount <= 1:
        raise UserError(f"--slow {text}: a rank can only be made slower, give more than 1x.")
    if amount > MAX_FACTOR:
        raise UserError(f"--slow {text}: give at most {MAX_FACTOR:g}x.")
    return Slow(rank=rank, factor=amount, text=f"{amount:g}x slower")


def parse_kill(text: str) -> Kill:
    """Parse ``1@5s``."""
    found = _KILL.fullmatch(text)
    if found is None:
        raise UserError(f"Write --kill as 1@5s, rank and training time, not {text!r}.")
    seconds = _seconds(f"--kill {text}", float(found[2]), found[3])
    return Kill(rank=int(found[1]), seconds=seconds)


def parse_kills(texts: Sequence[str]) -> tuple[Kill, ...]:
    """Parse several ``--kill``, each of another rank."""
    kills = tuple(map(parse_kill, texts))
    ranks = [kill.rank for kill in kills]
    if twice := [rank for rank in ranks if ranks.count(rank) > 1]:
        raise UserError(f"--kill kills rank {twice[0]} twice: only the first time would count.")
    return kills


def _seconds(what: str, amount: float, unit: str) -> float:
    seconds = amount * _UNIT_SECONDS[unit]
    if seconds > MAX_SECONDS:
        raise UserError(f"{what}: give at most {MAX_SECONDS:g} s, a day.")
    return seconds


def check_fault_ranks(slow: Sequence[str], kill: Sequence[str], world_size: int) -> None:
    """Check that the ranks of all faults exist."""
    named = [("--slow", text, parse_slow(text).rank) for text in slow]
    named += [("--kill", text, parse_kill(text).rank) for text in kill]
    for option, text, rank in named:
        if rank >= world_size:
            last = world_size - 1
            there_are = "there is only rank 0" if last == 0 else f"the ranks are 0-{last}"
            raise UserError(f"{option} {text}: there is no rank {rank}; {there_are}.")


# -- an emulated network -------------------------------------------------------------------

_LINK = re.compile(
    r"(\d+(?:\.\d+)?)([kMG]?)bit(?:/s)?(?:,(\d+(?:\.\d+)?)(us|ms|s))?", re.IGNORECASE
)
UNIT_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
UNIT_LATENCIES = _UNIT_SECONDS | {"us": 1e-6}
MAX_LATENCY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The link of each rank to all others; both directions at once, each at the full rate."""

    bits_per_second: float
    latency_seconds: float
    """One way."""

    @property
    def text(self) -> str:
        """For users: ``"1 Gbit/s and 0.5 ms"``."""
        return f"{_bits(self.bits_per_second)} and {_milliseconds(self.latency_seconds)}"


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
"""Typical links by name; ``docs/laboratory.md`` says where each figure is from."""


def slower_of(first: LinkSpec, second: LinkSpec) -> LinkSpec:
    """Return the link of a ring that has both in it: the lower rate, the longer latency."""
    return LinkSpec(
        bits_per_second=min(first.bits_per_second, second.bits_per_second),
        latency_seconds=max(first.latency_seconds, second.latency_seconds),
    )


def parse_link(text: str) -> LinkSpec:
    """Parse ``1Gbit,0.5ms`` or a name in ``LINKS``."""
    text = text.replace(" ", "")
    if text in LINKS:
        return LINKS[text]
    found = _LINK.fullmatch(text)
    if found is None:
        named = closest(text, LINKS) or f"one of {', '.join(LINKS)}"
        raise UserError(
            f"There is no link {text!r}: write rate and latency, as in 1Gbit,0.5ms, or {named}."
        )
    if found[3] is None:
        raise UserError(f"--link {text} has no latency: write both, as in {text},0.5ms.")
    rate = float(found[1]) * UNIT_RATES[found[2].lower()]
    latency = float(found[3]) * UNIT_LATENCIES[found[4].lower()]
    if rate == 0:
        raise UserError(f"--link {text}: nothing would ever arrive, give more than 0 bit/s.")
    if latency > MAX_LATENCY_SECONDS:
        raise UserError(f"--link {text}: give a latency of at most {MAX_LATENCY_SECONDS:g} s.")
    return LinkSpec(bits_per_second=rate, latency_seconds=latency)


def check_devices(strategy: str, devices: str, link: str) -> None:
    """Check that what a strategy exchanges can be timed on emulated devices, if there are any."""
    name = parse_strategy(strategy).name
    if (devices or link) and name in STRATEGIES and STRATEGIES[name].needs_shared_memory:
        option = "--devices" if devices else "--link"
        raise UserError(
            f"{name} trains in memory that its ranks share, which no link offers: "
            f"leave {option} out, or {name} out of the comparison."
        )


def check_across_hosts(strategies: Iterable[str]) -> None:
    """Check that strategies train on ranks of several hosts, which share no memory."""
    instead_of: dict[str, str] = {}
    for choice in map(parse_strategy, strategies):
        instead = STRATEGIES[choice.name].across_hosts if choice.name in STRATEGIES else ""
        if instead:
            instead_of[choice.name] = instead
    if instead_of:
        train = "trains" if len(instead_of) == 1 else "train"
        raise UserError(
            f"{', '.join(instead_of)} {train} in the memory of one host, and the ranks are on "
            f"several: compare {', '.join(dict.fromkeys(instead_of.values()))}."
        )


def _bits(rate: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:g} {unit}"
    return f"{rate:g} bit/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms"


# -- targets -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a training is to reach."""

    value: float
    is_accuracy: bool = False
    """Whether it is an accuracy on held-out samples; else it is a training loss."""

    @property
    def text(self) -> str:
        """For users: ``"loss 0.3"``, ``"95 % held-out accuracy"``."""
        if self.is_accuracy:
            return f"{100 * self.value:.4g} % held-out accuracy"
        return f"loss {self.value:g}"


def parse_target(given: float | str | None) -> Target | None:
    """Parse ``0.3``, ``accuracy=0.95`` or ``accuracy=95%``; None stays None."""
    if given is None:
        return None
    name, equals, number = str(given).rpartition("=")
    is_accuracy = name.strip() == "accuracy"
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = math.nan
    is_share = is_accuracy or not number.endswith("%")
    if (equals and not is_accuracy) or not math.isfinite(value) or not is_share:
        raise UserError(
            "--target is a training loss, e.g. 0.3, or an accuracy on held-out samples, "
            f"e.g. accuracy=0.95, not {given}."
        )
    if is_accuracy and not 0 < value <= 1:
        raise UserError(
            f"--target {given}: an accuracy is a share of the held-out samples, "
            "greater than 0 and at most 1, e.g. accuracy=0.95."
        )
    return Target(value=value, is_accuracy=is_accuracy)


# -- sizes ---------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|k|m|g|ki|mi|gi)b?", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(given: str | int) -> int:
    """Parse a number of bytes: ``4096``, ``64kB``, ``4MB``, ``1MiB``."""
    found = _SIZE.fullmatch(str(given).strip())
    num_bytes = int(float(found[1]) * _UNIT_BYTES[found[2].lower()]) if found else 0
    if num_bytes < 1:
        raise UserError(f"There is no size {str(given)!r}: write bytes, as in 4096, 64kB or 4MB.")
    return num_bytes
