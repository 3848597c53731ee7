import numpy as np
import pytest

from ddpnb.history.aggregate import Downsampler


def filled(values: np.ndarray, at_once: int, max_bins: int) -> Downsampler:
    downsampler = Downsampler(np.add, np.fmin, np.fmax, max_bins=max_bins)
    for first in range(0, len(values), at_once):
        downsampler.extend([values[first : first + at_once]] * 3)
    return downsampler


@pytest.mark.parametrize("num", [1, 7, 8, 9, 63, 64, 65, 1000])
@pytest.mark.parametrize("at_once", [1, 3, 10_000])
def test_however_entries_come_the_bins_are_the_same(num: int, at_once: int):
    values = np.random.default_rng(num).normal(size=num)
    bins = filled(values, at_once, 8).series
    assert bins.num_entries == num
    assert bins.columns.shape[1] <= 8
    parts = [values[i : i + bins.num_merged] for i in range(0, num, bins.num_merged)]
    np.testing.assert_allclose(bins.columns[0], [part.sum() for part in parts])
    np.testing.assert_allclose(bins.columns[1], [part.min() for part in parts])
    np.testing.assert_allclose(bins.columns[2], [part.max() for part in parts])


def test_a_snapshot_does_not_change():
    downsampler = filled(np.arange(20.0), 1, 8)
    before = downsampler.series
    kept = before.columns.copy()
    downsampler.extend([np.ones(500)] * 3)
    np.testing.assert_array_equal(before.columns, kept)


def test_what_is_unknown_is_passed_over():
    values = np.array([1.0, np.nan, np.nan, np.nan])
    bins = filled(values, 1, 2).series
    np.testing.assert_array_equal(bins.columns[1], [1.0, np.nan])
