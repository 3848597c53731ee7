"""Defines how an option that users can set is declared, checked and parsed.  Used in every process.

An option is declared once, as a field of a spec: ``clip: float = option(1.0, "largest norm")``.
The declaration defines the option's check, the magic's argument ``--clip`` and its help, tab
completion, the panel's control and the signature in Python.
"""

import contextlib
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

OPTION_KINDS: Mapping[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
}
"""For each type of value: the abstract type that ddpnb accepts, and a name for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option that a user can set."""

    default: Any
    about: str
    kind: type | None = None
    """The type of a value if ``default`` is None and the option is not a field of a spec."""
    choices: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    """The values that Tab suggests although other values are valid too."""
    least: float | None = None
    above: float | None = None
    """Exclusive lower bound: a value must be greater.  ``least`` is an inclusive bound."""
    most: float | None = None
    below: float | None = None
    """Exclusive upper bound: a value must be smaller.  ``most`` is an inclusive bound."""
    from_text: Callable[[str, str], Any] | None = None
    """A parser of a special notation, called with the option's name and the user's string."""
    flag: str = ""
    """The option in a magic's line, such as ``--epochs``.  If empty, the field's name is used."""
    group: str = ""
    example: str = "N"
    most_values: int = 1
    """Maximum number of values, which users write as ``"0.02,0.05"`` or as a tuple."""

    @property
    def keyword(self) -> str:
        """The option's name in Python: ``wait`` for ``--no-wait``.  ``wait`` is True by default."""
        name = self.flag.lstrip("-").removeprefix("no-").replace("-", "_")
        return f"{name}_" if keyword.iskeyword(name) else name

    @property
    def name(self) -> str:
        """The option's name in errors: the flag, or the Python name if the default is True."""
        return self.keyword if self.default is True else self.flag

    @property
    def meaning(self) -> str:
        """The option's help, which begins with the choices if there are any."""
        return f"{' | '.join(self.choices)}: {self.about}" if self.choices else self.about

    @property
    def value_kind(self) -> type:
        """The type of a value."""
        return self.kind or type(self.default)

    @property
    def values(self) -> tuple[str, ...]:
        """All valid values as strings; empty if the option has no fixed list of values."""
        return ("on", "off") if self.value_kind is bool else self.choices

    def words(self, value: Any) -> list[str]:
        """Return the words that set the option to a value in a magic's line."""
        if isinstance(value, bool):
            return [self.flag] if value else []
        if isinstance(value, tuple):
            return [self.flag, ",".join(value)]
        return [self.flag, f"{value:.12g}" if isinstance(value, float) else str(value)]

    def read(self, name: str, given: Any) -> Any:
        """Parse and check a value; if it is not valid, a UserError names the option ``name``."""
        return self.validate(name, self.parse(name, given))

    def parse(self, name: str, given: Any) -> Any:
        """Convert a user's strings to values.  Values that are not valid stay as they are."""
        if self.most_values == 1 or given is None:
            return self._parse_one(name, given)
        texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
        words: list[Any] = []
        for each in texts:
            words += each.split(",") if isinstance(each, str) else [each]
        return tuple(self._parse_one(name, word) for word in words)

    def _parse_one(self, name: str, given: Any) -> Any:
        if self.from_text is not None and isinstance(given, str | Real):
            return self.from_text(name, str(given))
        if not isinstance(given, str):
            return given
        if self.value_kind is bool and given in self.values:
            return given == "on"
        if self.value_kind in (int, float):
            with contextlib.suppress(ValueError):
                return self.value_kind(given)
        return given

    def validate(self, name: str, value: Any) -> Any:
        """Return a valid value, converted by ``as_kind``.  If it is not valid, raise UserError."""
        if self.most_values == 1 or not isinstance(value, tuple | list):
            return self._validate_one(name, value)
        values = tuple(self._validate_one(name, each) for each in value)
        if twice := [each for each in values if values.count(each) > 1]:
            raise UserError(f"{name} has the value {twice[0]} twice. Write each value once.")
        if len(values) > self.most_values or (self.default and not values):
            raise UserError(f"{name} takes 1 to {self.most_values} values, not {len(values)}.")
        return values

    def _validate_one(self, name: str, value: Any) -> Any:
        if value is None and self.default is None:
            return None
        if self.value_kind is bool and isinstance(value, str):
            raise UserError(f"{name} must be on or off, not {value!r}.")
        found = as_kind(name, value, self.value_kind)
        if self.choices and found not in (self.default, *self.choices):
            raise one_of(name, found, self.choices)
        if self.value_kind in (int, float):
            self._check_bounds(name, found)
        return found

    def _check_bounds(self, name: str, value: float) -> None:
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
            shown = f"{value:,.12g}" if isinstance(value, float) else f"{value:,}"
            raise UserError(f"{name} must be {allowed or 'a finite number'}, not {shown}.")


# -- the options of a spec -----------------------------------------------------------------


def option(default: Any, about: str, **described: Any) -> Any:
    """Return a field that declares an option of a spec; ``described`` sets fields of ``Option``."""
    made = Option(default=default, about=about, **described)
    return dataclasses.field(default=default, metadata={"option": made})


@functools.cache
def options_of(spec: type, *names: str) -> Mapping[str, Option]:
    """Return the options of a spec, by field name: all options, or only the named options."""
    found = {}
    for each in dataclasses.fields(spec):
        if each.metadata:
            made: Option = each.metadata["option"]
            kinds = *typing.get_args(each.type), each.type  # ``int | None``, ``tuple[str, ...]``
            flag = made.flag or f"--{each.name.rstrip('_').replace('_', '-')}"
            found[each.name] = dataclasses.replace(made, kind=kinds[0], flag=flag)
    return {name: found[name] for name in names or found}


def read_options(kind: type, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec that the user set, for its constructor, which checks them.

    ``choices`` maps the options' names in Python to strings or values.  Other names are ignored.
    """
    return {
        name: each.parse(each.name, choices[each.keyword])
        for name, each in options_of(kind).items()
        if each.keyword in choices
    }


def check_options(spec: Any) -> None:
    """Check the options of a frozen spec, and convert each value to the option's type."""
    kind: type = type(spec)
    for name, each in options_of(kind).items():
        object.__setattr__(spec, name, each.validate(each.name, getattr(spec, name)))


# -- types ---------------------------------------------------------------------------------


def as_kind(name: str, value: object, kind: type) -> Any:
    """Return a value as an object of a built-in type, which ddpnb can store and send.

    Numpy's numbers are valid, and whole numbers are valid floats.  Other types raise UserError.
    If ``kind`` is not in ``OPTION_KINDS``, objects of this class are returned unchanged.
    """
    if kind not in OPTION_KINDS and isinstance(value, kind):
        return value
    abstract, words = OPTION_KINDS.get(kind, (str, "a number or a string"))
    is_bool = isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's
    if is_bool if kind is bool else isinstance(value, abstract) and not is_bool:
        try:
            return kind(value)
        except OverflowError:
            raise UserError(f"{name} is too large. Write a smaller number.") from None
    if kind is str and isinstance(value, type):
        raise UserError(f"{name} takes a string, not a class. Write the name {value.__name__!r}.")
    is_short = isinstance(value, str | Real) and len(repr(value)) < 40
    shown = repr(value) if is_short else kind_of(value)
    raise UserError(f"{name} takes {words}, not {shown}.")
