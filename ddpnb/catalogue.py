"""Which strategies and tasks are there, and what can be chosen about each?  (Both sides.)

A choice is written as one word: ``ddp``, or with options ``ddp:hook=fp16,bucket_cap_mb=5``.
The constructor of a strategy, and the builder of a task, take these options by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpnb.errors import UserError, one_of

Value = bool | int | float | str

CELL_TASK = "cell"
"""The task whose model, data, loss and optimizer the notebook's cell defines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing to choose; a value is of its default's type."""

    default: Value
    about: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One strategy or task: what it is, in a line, and what can be chosen about it."""

    about: str
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one word stands for."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)
    """Those that were given."""


STRATEGIES: Mapping[str, Entry] = {
    "single": Entry(about="one device"),
    "dp": Entry(about="torch DataParallel; emulated on CPU threads where there are not two GPUs"),
    "ddp": Entry(about="torch DistributedDataParallel"),
    "async": Entry(about="one parameter server, workers never wait for each other"),
}
"""Strategies by name, in the order shown to users."""

TASKS: Mapping[str, Entry] = {
    "digits": Entry(about="scikit-learn's 1797 handwritten digits, 8x8 pixels: real data"),
    "cifar10": Entry(
        about="ResNet-18 on data/cifar-10-batches-bin; on synthetic images where there is none"
    ),
    "text": Entry(about="a small transformer learns Python's own sources, by character: real data"),
    "synthetic": Entry(
        about="CIFAR-shaped images made from a seed: synthetic data",
        options={
            "samples": Option(default=4096, least=16, about="images to train on"),
            "parameters": Option(
                default=0, least=0, about="of the model in all, for more to exchange; 0: as it is"
            ),
            "compute": Option(
                default=0, least=0, about="convolutions more for each image, for more to compute"
            ),
        },
    ),
}
"""Built-in tasks by name."""


def strategy(word: str) -> Choice:
    """Return the strategy that a word names.

    A name that begins with a capital letter is a class of the user's own; whether there is
    one, and which options it takes, is known on the ranks alone.

    Raises:
        UserError: there is no such strategy or option, or a value does not fit.
    """
    if word[:1].isupper() and word.split(":")[0].isidentifier():
        name, given = _split(word)
        return Choice(name=name, options={key: _guess(value) for key, value in given.items()})
    return _choice("strategy", word, STRATEGIES)


def task(word: str) -> Choice:
    """Return the task that a word names.

    Raises:
        UserError: there is no such task or option, or a value does not fit.
    """
    return Choice(name=CELL_TASK) if word == CELL_TASK else _choice("task", word, TASKS)


def _choice(kind: str, word: str, entries: Mapping[str, Entry]) -> Choice:
    name, given = _split(word)
    if name not in entries:
        raise one_of(kind, name, entries)
    options = entries[name].options
    for key in given:
        if not options:
            raise UserError(f"{name} has no options, but was given {key}.")
        if key not in options:
            raise one_of(f"option of {name}", key, options)
    return Choice(
        name=name,
        options={key: _value(f"{name}:{key}", options[key], text) for key, text in given.items()},
    )


def _split(word: str) -> tuple[str, dict[str, str]]:
    name, _, rest = word.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    if any(not key or not equals for key, equals, _ in pairs):
        raise UserError(f"Write options as {name}:option=value,option=value, not {word}.")
    return name, {key: value for key, _, value in pairs}


def _value(what: str, option: Option, text: str) -> Value:
    if isinstance(option.default, bool):
        if text not in ("on", "off"):
            raise UserError(f"{what} is on or off, not {text}.")
        return text == "on"
    if option.choices and text not in option.choices:
        raise one_of(what, text, option.choices)
    if isinstance(option.default, str):
        return text
    return _number(what, option, text)


def _number(what: str, option: Option, text: str) -> int | float:
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{what} is a number, not {text}.") from None
    if not math.isfinite(number) or number < option.least:
        raise UserError(f"{what} must be at least {option.least:g}, not {text}.")
    if isinstance(option.default, float):
        return number
    if number != int(number):
        raise UserError(f"{what} is a whole number, not {text}.")
    return int(number)


def _guess(text: str) -> Value:
    """Return the value of an option whose type is known on the ranks alone."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"on": True, "off": False}.get(text, text)
