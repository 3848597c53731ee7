"""``%ddp_exercise``: where an exercise is checked, and what the student reads (kernel)."""

from collections.abc import Mapping
from typing import Any

from ddpnb.course.exercises import HINTS, Hint, check
from ddpnb.course.in_notebook import CHECKS
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.session.cells import CellOptions
from ddpnb.session.errors import CellTimeoutError, HangError, RankError
from ddpnb.session.session import this_session

SECONDS = 20.0
"""Longest check on the ranks; then they are stopped, and keep their variables."""


def check_exercise(number: str, variables: Mapping[str, Any]) -> str:
    """Check an exercise, with a supervised call where it concerns code on the ranks.

    Args:
        number: of the lesson and the exercise, ``"3.2"``.
        variables: of the notebook.

    Returns:
        A sentence that it is solved.

    Raises:
        UserError: it is not; with a hint.
        RankError: what the student wrote raised on a rank.
    """
    if number not in HINTS:
        raise one_of("exercise", number, HINTS)
    try:
        if number in CHECKS:
            _in_notebook(number, variables)
        else:
            _on_ranks(number)
    except Hint as hint:
        raise UserError(f"Exercise {number} is not solved yet: {hint}") from None
    return f"Exercise {number} is solved."


def _in_notebook(number: str, variables: Mapping[str, Any]) -> None:
    try:
        check(CHECKS[number], variables)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Hint(f"{type(error).__name__}: {error}. {HINTS[number]}") from None


def _on_ranks(number: str) -> None:
    source = f"from ddpnb.course import on_ranks\non_ranks.check({number!r}, globals())"
    try:
        this_session().run_cell(source, CellOptions(timeout=SECONDS))
    except (HangError, CellTimeoutError) as error:
        raise Hint(f"{error} {HINTS[number]}") from None
    except RankError as error:
        first = error.failures[0]
        if first.name == Hint.__name__:
            raise Hint(first.text) from None
        print(f"Exercise {number} is not solved yet. {HINTS[number]}")
        raise
