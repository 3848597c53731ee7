import pytest

from ddpnb.notebook.show.pace import CREDIT_SECONDS, MAX_SHARE, REDRAW_SECONDS, Pace


class Clock:
    """A time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0

    def draws(self, cost: float) -> None:
        self.now += cost
        self.spent += cost


@pytest.mark.parametrize("cost", [0.001, 0.03, 0.2, 3.0])
def test_drawing_takes_its_share_and_no_more(cost: float):
    clock = Clock()
    pace = Pace(lambda: clock.now, lambda: clock.spent)
    num = 0
    while clock.now < 300:
        if pace.is_due():
            pace.draw(lambda: clock.draws(cost))
            num += 1
        clock.now += 0.05
    assert clock.spent <= MAX_SHARE * clock.now + CREDIT_SECONDS + cost
    assert num >= min(clock.now / (REDRAW_SECONDS + 0.05 + cost), MAX_SHARE * clock.now / cost) - 1


def test_one_dear_picture_does_not_stop_the_next_ones():
    clock = Clock()
    pace = Pace(lambda: clock.now, lambda: clock.spent)
    pace.draw(lambda: clock.draws(0.2))
    assert not pace.is_due()
    clock.now += REDRAW_SECONDS
    assert pace.is_due()
