"""Checks an exercise for ``%ddp_exercise`` and reports mistakes.  Runs in the kernel."""

from collections.abc import Mapping
from typing import Any

from ddpnb.course.exercises import HINTS, Hint, check
from ddpnb.course.in_notebook import CHECKS_IN_NOTEBOOK
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.session.cells import CellOptions
from ddpnb.session.errors import CellTimeoutError, HangError, RankError
from ddpnb.session.session import this_session

CHECK_SECONDS = 20.0
"""Time limit of a check on the ranks.  After this time, the ranks stop and keep their variables."""


def check_exercise(number: str, variables: Mapping[str, Any]) -> str:
    """Check an exercise, either in the notebook or with a supervised call on the ranks.

    Args:
        number: the numbers of the lesson and the exercise, such as ``"3.2"``.
        variables: the notebook's variables.

    Returns:
        A message saying that the exercise is solved.

    Raises:
        UserError: the exercise is not solved.  The message contains a hint.
        RankError: the student's code raised an error on a rank.
    """
    if number not in HINTS:
        raise one_of("exercise", number, HINTS)
    try:
        if number in CHECKS_IN_NOTEBOOK:
            _in_notebook(number, variables)
        else:
            _on_ranks(number)
    except Hint as hint:
        raise UserError(
            f"Exercise {number} is not solved yet. {hint} Hint: {HINTS[number]}"
        ) from None
    return f"Exercise {number} is solved."


def _in_notebook(number: str, variables: Mapping[str, Any]) -> None:
    try:
        check(CHECKS_IN_NOTEBOOK[number], variables)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Hint(f"The check raised {type(error).__name__}: {error}.") from None


def _on_ranks(number: str) -> None:
    source = f"from ddpnb.course import on_ranks\non_ranks.check({number!r}, globals())"
    try:
        this_session().run_cell(source, CellOptions(timeout=CHECK_SECONDS))
    except (HangError, CellTimeoutError) as error:
        raise Hint(str(error)) from None
    except RankError as error:
        first = error.failures[0]
        if first.name == Hint.__name__:
            raise Hint(first.text) from None
        print(f"Exercise {number} is not solved yet. Hint: {HINTS[number]}")
        raise
