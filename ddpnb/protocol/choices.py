"""Strategies and tasks as users write them: ``ddp:hook=fp16,bucket_cap_mb=5``.  (Every process.)"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpnb.protocol.catalogue import CELL_TASK, STRATEGIES, TASKS, Entry
from ddpnb.protocol.errors import UserError, advice, one_of
from ddpnb.protocol.options import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy or task, and the options that the user gave it."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)


def parse_strategy(text: str) -> Choice:
    """Return the strategy that a text names.

    A name that begins with a capital letter is the user's own class.  Only the ranks know
    whether it exists and which options it takes.

    Raises:
        UserError: there is no such strategy or option, or a value does not fit.
    """
    if text[:1].isupper() and text.split(":")[0].isidentifier():
        name, given = _split(text)
        return Choice(name=name, options={key: _guess(value) for key, value in given.items()})
    return _parse("strategy", text, STRATEGIES)


def parse_task(text: str) -> Choice:
    """Return the task that a text names.

    Raises:
        UserError: there is no such task or option, or a value does not fit.
    """
    return Choice(name=CELL_TASK) if text == CELL_TASK else _parse("task", text, TASKS)


def has_transport(text: str) -> bool:
    """Return whether a strategy may use ``--transport``; one of the user's own may."""
    name = parse_strategy(text).name
    return name not in STRATEGIES or bool(STRATEGIES[name].transports)


def check_transport(text: str, transport: str) -> None:
    """Check that a strategy supports one of ``training_options.TRANSPORTS``.

    Raises:
        UserError: it does not, or there is no such strategy.
    """
    name = parse_strategy(text).name
    allowed = STRATEGIES[name].transports if name in STRATEGIES else ()
    if allowed and transport not in allowed:
        raise UserError(
            f"{name} trains in shared memory, not by {transport}: "
            f"leave --transport out, or {name} out of the comparison."
        )


def _parse(kind: str, text: str, entries: Mapping[str, Entry]) -> Choice:
    name, given = _split(text)
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
