import numpy as np
import pytest

from ddpnb.runs.aggregate import Downsampler


def filled(values: np.ndarray, at_once: int, max_cells: int) -> Downsampler:
    downsampler = Downsampler(num_sums=1, num_lows=1, num_highs=1, max_cells=max_cells)
    for first in range(0, len(values), at_once):
        part = values[None, first : first + at_once]
        downsampler.extend(part, part, part)
    return downsampler


@pytest.mark.parametrize("num", [1, 7, 8, 9, 63, 64, 65, 1000])
@pytest.mark.parametrize("at_once", [1, 3, 10_000])
def test_however_entries_come_the_cells_are_the_same(num: int, at_once: int):
    values = np.random.default_rng(num).normal(size=num)
    cells = filled(values, at_once, 8).view()
    assert cells.num_entries == num
    assert cells.sums.shape[1] <= 8
    parts = [values[i : i + cells.num_merged] for i in range(0, num, cells.num_merged)]
    np.testing.assert_allclose(cells.sums[0], [part.sum() for part in parts])
    np.testing.assert_allclose(cells.lows[0], [part.min() for part in parts])
    np.testing.assert_allclose(cells.highs[0], [part.max() for part in parts])


def test_a_view_does_not_change():
    downsampler = filled(np.arange(20.0), 1, 8)
    before = downsampler.view()
    kept = before.sums.copy()
    downsampler.extend(*[np.ones((1, 500))] * 3)
    np.testing.assert_array_equal(before.sums, kept)


def test_what_is_unknown_is_passed_over():
    values = np.array([1.0, np.nan, np.nan, np.nan])
    cells = filled(values, 1, 2).view()
    np.testing.assert_array_equal(cells.lows[0], [1.0, np.nan])
