import pytest

from ddpnb.notebook.show.pace import (
    BUSY_SHARE,
    CREDIT_SECONDS,
    DEBT_SECONDS,
    MAX_SHARE,
    REDRAW_SECONDS,
    Pace,
    idle_seconds,
)


class Clock:
    """A time that goes on only when told to; so many cores are idle."""

    def __init__(self, num_idle: float) -> None:
        self.now = self.spent = 0.0
        self.num_idle = num_idle

    def draws(self, cost: float) -> None:
        self.now += cost
        self.spent += cost

    def pace(self) -> Pace:
        return Pace(lambda: self.now, lambda: self.spent, lambda: self.num_idle * self.now)


@pytest.mark.parametrize(("num_idle", "share"), [(1.0, MAX_SHARE), (0.2, BUSY_SHARE)])
@pytest.mark.parametrize("cost", [0.001, 0.015, 0.03])
def test_drawing_takes_its_share_and_no_more(cost: float, num_idle: float, share: float):
    clock = Clock(num_idle)
    pace = clock.pace()
    num = 0
    while clock.now < 300:
        if pace.is_due():
            pace.draw(lambda: clock.draws(cost))
            num += 1
        clock.now += 0.05
    assert clock.spent <= share * clock.now + CREDIT_SECONDS + cost
    assert (
        num
        >= min(clock.now / (REDRAW_SECONDS + 0.05 + cost), share * (clock.now - clock.spent) / cost)
        - 1
    )


@pytest.mark.parametrize("num_idle", [0.0, 2.0])
def test_a_core_that_becomes_free_is_used(num_idle: float):
    clock = Clock(0.0)
    pace = clock.pace()
    pace.draw(lambda: clock.draws(0.2))
    clock.now += 0.25 * DEBT_SECONDS / BUSY_SHARE
    assert not pace.is_due()
    clock.num_idle = num_idle
    clock.now += 0.9 * DEBT_SECONDS / MAX_SHARE
    assert pace.is_due() == (num_idle > 0)


def test_one_dear_picture_does_not_stop_the_next_ones():
    clock = Clock(0.0)
    pace = clock.pace()
    pace.draw(lambda: clock.draws(3.0))
    clock.now += 0.5 * DEBT_SECONDS / BUSY_SHARE
    assert not pace.is_due(), "nor is it drawn without end"
    clock.now += 0.6 * DEBT_SECONDS / BUSY_SHARE
    assert pace.is_due()


def test_idle_time_only_grows():
    before = idle_seconds()
    assert idle_seconds() >= before > 0
