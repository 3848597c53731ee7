import itertools

import pytest

from tests.rank.pairwise import pairs_in, pairwise_cases

VALUES = (list("abcdef"), [1, 2, 3], ["x", "y", "z"], [True, False])


@pytest.mark.parametrize("excluded", [[], [{"a", "x"}, {"b", 2}]])
def test_every_two_values_meet_in_few_cases(excluded):
    cases = pairwise_cases(*VALUES, excluded=excluded)
    allowed = [
        case
        for case in itertools.product(*VALUES)
        if not any(pair <= set(case) for pair in excluded)
    ]
    assert set(cases) <= set(allowed)
    assert set().union(*map(pairs_in, cases)) == set().union(*map(pairs_in, allowed))
    assert len(cases) < 24 < len(allowed)
