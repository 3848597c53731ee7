from itertools import pairwise

import pytest

from ddpnb.reports.figures.layout import spread_out


def test_labels_far_apart_stay_where_they_are():
    assert spread_out([0.9, 0.1, 0.5], 0.2) == [0.9, 0.1, 0.5]


def test_close_labels_make_room_around_their_mean():
    assert spread_out([0.5, 0.52], 0.1) == pytest.approx([0.46, 0.56])


def test_labels_at_the_edge_stay_inside():
    assert spread_out([0.0, 0.0, 0.0], 0.1) == pytest.approx([0.0, 0.1, 0.2])
    assert spread_out([1.0, 1.0], 0.1) == pytest.approx([0.9, 1.0])


def test_blocks_that_touch_are_joined():
    placed = sorted(spread_out([0.30, 0.31, 0.38, 0.40], 0.1))
    gaps = [after - before for before, after in pairwise(placed)]
    assert gaps == pytest.approx([0.1] * 3)


def test_too_many_labels_are_packed_evenly():
    assert spread_out([0.5] * 5, 0.5) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_no_labels():
    assert spread_out([], 0.1) == []
