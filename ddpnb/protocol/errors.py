"""What can go wrong that a user should read about, and how does it read?  (Both sides.)"""

import difflib
from collections.abc import Collection, Iterable

FEW = 5
"""So many names can be read at a glance."""
LIKELY = 0.65
"""How alike two names must be, of 1, for one to stand for the other by mistake."""


class UserError(Exception):
    """A mistake the user can mend, told in one sentence that says how.

    IPython shows it as that one sentence, without a traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows (its protocol for exceptions that render themselves)."""
        return [f"{type(self).__name__}: {self}"]


def one_of(what: str, given: object, choices: Iterable[object]) -> UserError:
    """Return the error for a name that is not among ``choices``.

    Args:
        what: what the name stands for, e.g. ``"strategy"``.
        given: the name that was given.
        choices: the names that exist, in the order to show them.
    """
    names = [str(choice) for choice in choices]
    return UserError(f"There is no {what} {str(given)!r}; {advice(str(given), names, few=FEW)}")


def advice(given: str, names: Collection[str], *, few: int = 0) -> str:
    """Return what to do about a name that does not exist: the ones meant, or all there are.

    Args:
        given: the name that was given.
        names: the names that exist.
        few: so many are told all, whatever was meant.
    """
    if len(names) > few and (near := closest(given, names)):
        return f"did you mean {near}?"
    return f"choose one of: {', '.join(names)}."


def closest(given: str, names: Iterable[str]) -> str:
    """Return the one or two names that were likely meant, ``"dp or ddp"``; empty for none."""
    return " or ".join(difflib.get_close_matches(given, names, n=2, cutoff=LIKELY))


def kind_of(value: object) -> str:
    """Return what a value is, for a sentence: ``"a Tensor"``, ``"an int"``, ``"None"``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def summary_of(error: Exception) -> str:
    """Return an exception in one line: its class and the first line of what it says."""
    reason = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {reason}"
