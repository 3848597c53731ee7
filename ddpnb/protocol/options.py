"""Options: what a user can choose about a cluster, a cell, a training.  (Every process.)

An option is declared once, as a field of a spec: ``clip: float = option(1.0, "largest norm")``.
Its check, the magic's argument ``--clip`` and help, tab completion, the panel's control and the
signature in Python follow from the declaration.
"""

import dataclasses
import functools
import keyword
import math
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ddpnb.protocol.errors import UserError, kind_of, one_of

KINDS: Mapping[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}
"""Types of values, what stands for each, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing that a user can choose."""

    default: Any
    about: str
    kind: type | None = None
    """The type of a value, where ``default`` is None and no field has it."""
    choices: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    """What Tab offers, where other values are valid too."""
    least: float | None = None
    above: float | None = None
    """In place of ``least``: a bound that is not allowed itself."""
    most: float | None = None
    below: float | None = None
    """In place of ``most``: a bound that is not allowed itself."""
    from_text: Callable[[str, str], Any] | None = None
    """Parses a special notation, given the option's name and the text."""
    flag: str = ""
    """In a magic's line, where it is not the field's name, as ``--batch-size``."""
    group: str = ""
    """The heading above its help."""
    example: str = "N"
    most_values: int = 1
    """How many values may be given: ``"0.02,0.05"``, a tuple."""

    @property
    def keyword(self) -> str:
        """Its name in Python: ``--no-wait`` is ``wait``, which is True by default."""
        name = self.flag.lstrip("-").removeprefix("no-").replace("-", "_")
        return f"{name}_" if keyword.iskeyword(name) else name

    @property
    def name(self) -> str:
        """What errors call it; only in Python can ``wait`` have a wrong value."""
        return self.keyword if self.default is True else self.flag

    @property
    def meaning(self) -> str:
        """Its line of help, with its choices if it has any."""
        return f"{' | '.join(self.choices)}: {self.about}" if self.choices else self.about

    @property
    def value_kind(self) -> type:
        """The type of a value."""
        return self.kind or type(self.default)

    @property
    def values(self) -> tuple[str, ...]:
        """All values, as texts, if they can be listed."""
        return ("on", "off") if self.value_kind is bool else self.choices

    def words(self, value: Any) -> list[str]:
        """Return the words of a magic's line that choose a value."""
        if isinstance(value, bool):
            return [self.flag] if value else []
        if isinstance(value, tuple):
            return [self.flag, ",".join(value)]
        return [self.flag, f"{value:.12g}" if isinstance(value, float) else str(value)]

    def read(self, name: str, given: Any) -> Any:
        """Return a valid value from what was given in a text or in Python.

        A UserError, which calls the option ``name``, says what is valid.
        """
        if self.most_values == 1 or given is None:
            return self._read_one(name, given)
        texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
        parts: list[Any] = []
        for each in texts:
            parts += each.split(",") if isinstance(each, str) else [each]
        values = tuple(self._read_one(name, part) for part in parts)
        if twice := [value for value in values if values.count(value) > 1]:
            raise UserError(f"{name} has {twice[0]} twice: give each value once.")
        if len(values) > self.most_values or (self.default and not values):
            raise UserError(f"{name} takes 1 to {self.most_values} values, not {len(values)}.")
        return values

    def _read_one(self, name: str, given: Any) -> Any:
        if self.from_text is not None and isinstance(given, str | Real):
            return self.validate(name, self.from_text(name, str(given)), given)
        kind, value = self.value_kind, given
        if kind is bool and isinstance(given, str):
            if given not in self.values:
                raise UserError(f"{name} takes on or off, not {given!r}.")
            value = given == "on"
        elif kind in (int, float) and isinstance(given, str):
            try:
                value = kind(given)
            except ValueError:
                value = given  # refused below
        return self.validate(name, value, given)

    def validate(self, name: str, value: Any, given: Any = None) -> Any:
        """Return a value, converted by ``as_kind``, if it is valid; raises as ``read``.

        An error quotes ``given``, what the user wrote, if that is something else.
        """
        if value is None and self.default is None:
            return None
        found = as_kind(name, value, self.value_kind)
        if self.choices and found not in (self.default, *self.choices):
            raise one_of(name, found, self.choices)
        if self.value_kind in (int, float):
            self._check_bounds(name, found, found if given is None else given)
        return found

    def _check_bounds(self, name: str, value: float, given: object) -> None:
        bounds = (
            ("at least", self.least, operator.ge),
            ("greater than", self.above, operator.gt),
            ("at most", self.most, operator.le),
            ("less than", self.below, operator.lt),
        )
        set_here = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
        is_number = not isinstance(value, float) or math.isfinite(value)
        if not (is_number and all(holds(value, bound) for _, bound, holds in set_here)):
            allowed = " and ".join(f"{words} {bound:,}" for words, bound, _ in set_here)
            raise UserError(f"{name} must be {allowed or 'a finite number'}, not {given}.")


# -- the options of a spec -----------------------------------------------------------------


def option(default: Any, about: str, **described: Any) -> Any:
    """Return a field of a spec that the user can choose; ``described`` are fields of ``Option``."""
    made = Option(default=default, about=about, **described)
    return dataclasses.field(default=default, metadata={"option": made})


@functools.cache
def options_of(spec: type, *names: str) -> Mapping[str, Option]:
    """Return the options of a spec, of all fields or of those named, by the field."""
    found = {}
    for each in dataclasses.fields(spec):
        if each.metadata:
            made: Option = each.metadata["option"]
            kinds = *typing.get_args(each.type), each.type  # of ``int | None``, ``tuple[str, ...]``
            flag = made.flag or f"--{each.name.rstrip('_').replace('_', '-')}"
            found[each.name] = dataclasses.replace(made, kind=kinds[0], flag=flag)
    return {name: found[name] for name in names or found}


def read_options(kind: type, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec that the user chose; a UserError if a choice is not possible.

    ``choices`` are texts or values by the options' names in Python; other names are ignored.
    """
    return {
        name: each.read(each.name, choices[each.keyword])
        for name, each in options_of(kind).items()
        if each.keyword in choices
    }


def check_options(spec: Any) -> None:
    """Check the options of a frozen spec; each has a value of its own kind then."""
    kind: type = type(spec)
    for name, each in options_of(kind).items():
        value = getattr(spec, name)
        is_several = each.most_values > 1 and isinstance(value, tuple | list)  # from the store
        checked = each.read(each.name, value) if is_several else each.validate(each.name, value)
        object.__setattr__(spec, name, checked)


# -- types ---------------------------------------------------------------------------------


def as_kind(name: str, value: object, kind: type) -> Any:
    """Return a value as an object of a built-in type, which can be stored and sent anywhere.

    Accepts numpy's numbers, and a whole number for a float.  A UserError calls a value of another
    kind ``name``.  ``kind`` is in ``KINDS``, or a class, of which values stay as they are.
    """
    if kind not in KINDS and isinstance(value, kind):
        return value
    abstract, words = KINDS.get(kind, (str, "a number or a text"))
    is_bool = isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's
    if is_bool if kind is bool else isinstance(value, abstract) and not is_bool:
        try:
            return kind(value)
        except OverflowError:
            raise UserError(f"{name} is too large a number.") from None
    if kind is str and isinstance(value, type):
        raise UserError(f"{name} takes a text, not a class: write its name, {value.__name__!r}.")
    is_short = isinstance(value, str | Real) and len(repr(value)) < 40
    shown = repr(value) if is_short else kind_of(value)
    raise UserError(f"{name} takes {words}, not {shown}.")
