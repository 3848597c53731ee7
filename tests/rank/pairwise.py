"""Cases that try every pair of values together, in place of every combination."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Case = tuple[Any, ...]


def pairwise_cases(*values: Sequence[Any], excluded: Iterable[set[Any]] = ()) -> list[Case]:
    """Return cases, one value of each parameter, in which every two values meet.

    Args:
        values: each parameter's values.
        excluded: values of two parameters that may not meet.
    """
    possible = [
        case
        for case in itertools.product(*values)
        if not any(pair <= set(case) for pair in excluded)
    ]
    missing = set().union(*map(pairs_in, possible))
    cases: list[Case] = []
    while missing:
        best = max(possible, key=lambda case: len(missing & pairs_in(case)))
        missing -= pairs_in(best)
        cases.append(best)
    return sorted(cases, key=possible.index)


def pairs_in(case: Case) -> set[tuple[tuple[int, Any], ...]]:
    """Return every two values of a case, each with the number of its parameter."""
    return set(itertools.combinations(enumerate(case), 2))
