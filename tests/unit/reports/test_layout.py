import pytest

from ddpnb.reports.figures.layout import spread_out


@pytest.mark.parametrize(
    ("wanted", "gap", "placed"),
    [
        ([0.9, 0.1, 0.5], 0.2, [0.9, 0.1, 0.5]),  # far apart: they stay
        ([0.5, 0.52], 0.1, [0.46, 0.56]),  # around their mean
        ([0.0, 0.0, 0.0], 0.1, [0.0, 0.1, 0.2]),  # inside
        ([1.0, 1.0], 0.1, [0.9, 1.0]),
        ([0.38, 0.31, 0.30, 0.40], 0.1, [0.3975, 0.2975, 0.1975, 0.4975]),  # blocks that touch
        ([0.5] * 5, 0.5, [0, 0.25, 0.5, 0.75, 1.0]),  # too many: packed evenly
        ([], 0.1, []),
    ],
)
def test_labels_are_spread_out(wanted: list[float], gap: float, placed: list[float]):
    assert spread_out(wanted, gap) == pytest.approx(placed)
