"""Faults on purpose, as users write them.  (Every process.)

1:3x     rank 1 computes 3 times as long
1:50ms   each step of rank 1 takes 50 ms longer; also 1:0.05s
1@5s     rank 1 is killed after 5 seconds of training; also 1@500ms
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpnb.protocol.errors import UserError

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
    """Parse ``1:3x`` or ``1:50ms``.

    Raises:
        UserError: it is not written so, or not slower.
    """
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
    """Parse ``1@5s``.

    Raises:
        UserError: it is not written so.
    """
    found = _KILL.fullmatch(text)
    if found is None:
        raise UserError(f"Write --kill as 1@5s, rank and training time, not {text!r}.")
    seconds = _seconds(f"--kill {text}", float(found[2]), found[3])
    return Kill(rank=int(found[1]), seconds=seconds)


def parse_kills(texts: Sequence[str]) -> tuple[Kill, ...]:
    """Parse several ``--kill``, each of another rank.

    Raises:
        UserError: one is wrong, or two are of the same rank.
    """
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


def check_ranks(slow: Sequence[str], kill: Sequence[str], world_size: int) -> None:
    """Check that the ranks of all faults exist.

    Raises:
        UserError: one does not.
    """
    named = [("--slow", text, parse_slow(text).rank) for text in slow]
    named += [("--kill", text, parse_kill(text).rank) for text in kill]
    for option, text, rank in named:
        if rank >= world_size:
            last = world_size - 1
            there_are = "there is only rank 0" if last == 0 else f"the ranks are 0-{last}"
            raise UserError(f"{option} {text}: there is no rank {rank}; {there_are}.")
