import pytest

from ddpnb.reports.drawing import (
    BUSY_SHARE,
    MAX_PAUSE_SECONDS,
    MAX_SHARE,
    REDRAW_SECONDS,
    DrawingGuard,
    RedrawThrottle,
)


class Clock:
    """A time that goes on only when a drawing or a test moves it."""

    def __init__(self, busy_percent: float) -> None:
        self.now = self.spent = 0.0
        self.busy_percent = busy_percent
        self.throttle = RedrawThrottle(
            lambda: self.now, lambda: self.spent, lambda: self.busy_percent
        )

    def draw(self, cost: float) -> None:
        self.now += cost
        self.spent += cost


@pytest.mark.parametrize(("busy_percent", "share"), [(50.0, MAX_SHARE), (95.0, BUSY_SHARE)])
@pytest.mark.parametrize("cost", [0.001, 0.02, 0.07])
def test_drawing_takes_its_share_and_no_more(cost: float, busy_percent: float, share: float):
    clock = Clock(busy_percent)
    num = 0
    while clock.now < 300:
        if clock.throttle.is_due():
            clock.throttle.draw(lambda: clock.draw(cost))
            num += 1
        clock.now += 0.05
    assert clock.spent <= share * clock.now + cost
    pause = max(REDRAW_SECONDS, cost / share)
    assert clock.now / (pause + 0.1 + cost) <= num <= clock.now / pause + 1


def test_a_dear_picture_does_not_stop_the_next_ones():
    clock = Clock(100.0)
    assert clock.throttle.is_due()
    clock.throttle.draw(lambda: clock.draw(3.0))
    clock.now += 0.9 * MAX_PAUSE_SECONDS
    assert not clock.throttle.is_due()
    clock.now += 0.2 * MAX_PAUSE_SECONDS
    assert clock.throttle.is_due()


def test_cores_that_become_idle_are_used():
    clock = Clock(100.0)
    clock.throttle.draw(lambda: clock.draw(0.06))
    clock.now += 0.06 / MAX_SHARE + 0.1
    assert not clock.throttle.is_due()
    clock.now += 0.06 / BUSY_SHARE
    clock.busy_percent = 20.0
    clock.throttle.draw(lambda: clock.draw(0.06))
    clock.now += 0.06 / MAX_SHARE + 0.1
    assert clock.throttle.is_due()


def test_what_cannot_be_drawn_is_said_once_and_the_next_drawing_is_tried(capsys):
    guard, drawn = DrawingGuard(), []

    def fail() -> None:
        raise ValueError("no colour")

    guard.draw(fail)
    guard.draw(fail)
    guard.draw(lambda: drawn.append(1))
    assert drawn == [1]
    assert capsys.readouterr().err.count("ValueError: no colour") == 1
