"""Errors for users, and the phrases in them.  (Every process.)"""

import difflib
from collections.abc import Collection, Iterable

FEW = 5
"""As many names are listed in full."""
SIMILARITY = 0.65
"""Of a misspelt name to the one that was meant; 1: equal."""


class OneLine(BaseException):
    """An error that IPython shows in one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows (its protocol for exceptions that render themselves)."""
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLine, Exception):
    """A mistake that the user can correct; its one sentence says how."""


def one_of(what: str, given: object, choices: Iterable[object]) -> UserError:
    """Return the error for a name of the kind ``what`` that is not among ``choices``."""
    names = [str(choice) for choice in choices]
    return UserError(f"There is no {what} {str(given)!r}; {advice(str(given), names, few=FEW)}")


def advice(given: str, names: Collection[str], *, few: int = 0) -> str:
    """Return a hint: the names that were probably meant; else, or if at most ``few``, all names."""
    if len(names) > few and (near := closest(given, names)):
        return f"did you mean {near}?"
    return f"choose one of: {', '.join(names)}."


def closest(given: str, names: Iterable[str]) -> str:
    """Return the one or two names that were probably meant, ``"dp or ddp"``; empty if none."""
    return " or ".join(difflib.get_close_matches(given, names, n=2, cutoff=SIMILARITY))


def kind_of(value: object) -> str:
    """Return a value's type for a sentence: ``"a Tensor"``, ``"an int"``, ``"None"``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def summary_of(error: Exception) -> str:
    """Return an exception in one line: its class and the first line of its message."""
    reason = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {reason}"
