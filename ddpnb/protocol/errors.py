"""Errors for users, and functions that write parts of their messages.  Used in every process."""

import difflib
from collections.abc import Collection, Iterable

FEW = 5
"""Maximum number of names that a message lists in full."""
SIMILARITY = 0.65
"""Minimum similarity between a misspelt name and a suggested name; 1 means equal."""


class OneLine(BaseException):
    """The base class of errors that IPython shows in one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback (IPython's protocol)."""
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLine, Exception):
    """A mistake that the user can correct; the message says how."""


def one_of(what: str, given: object, choices: Iterable[object]) -> UserError:
    """Return the error for a name that is not among ``choices``; ``what`` is the kind of name."""
    names = [str(choice) for choice in choices]
    return UserError(f"There is no {what} {str(given)!r}; {advice(str(given), names, few=FEW)}")


def advice(given: str, names: Collection[str], *, few: int = 0) -> str:
    """Return a hint: similar names, or all names if there are few names or no similar name."""
    if len(names) > few and (near := closest(given, names)):
        return f"did you mean {near}?"
    return f"choose one of: {', '.join(names)}."


def closest(given: str, names: Iterable[str]) -> str:
    """Return one or two similar names, such as ``"dp or ddp"``; empty if no name is similar."""
    return " or ".join(difflib.get_close_matches(given, names, n=2, cutoff=SIMILARITY))


def kind_of(value: object) -> str:
    """Return a value's type with its article: ``"a Tensor"``, ``"an int"``, ``"None"``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def summary_of(error: Exception) -> str:
    """Return an exception's class and the first line of its message, in one line."""
    reason = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {reason}"
