"""Are ranks waited for as long as theory says?"""

import math

import pytest

from ddpnb.scaling.waiting import expected_max, on_cores


def test_ranks_take_turns_on_cores():
    assert on_cores(0.01, 2, 2) == 0.01
    assert on_cores(0.3, 3, 2) == pytest.approx(0.45)  # long work is shared evenly
    assert on_cores(0.001, 3, 2) == pytest.approx(0.002)  # short work is not cut
    assert on_cores(0.01, 4, 2) == pytest.approx(0.02)


def test_the_slowest_of_several_is_as_slow_as_order_statistics_say():
    assert expected_max(1) == 0
    assert expected_max(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-4)
    assert expected_max(100) == pytest.approx(2.5076, rel=1e-3)  # tables of normal scores
    assert expected_max(1000) == pytest.approx(3.2414, rel=1e-3)
