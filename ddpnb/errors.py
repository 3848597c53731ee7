"""What can go wrong that a user should read about, and how does it read?  (Both sides.)"""

from collections.abc import Iterable


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
    names = ", ".join(str(choice) for choice in choices)
    return UserError(f"There is no {what} {str(given)!r}; choose one of: {names}.")
