from ddpnb.rank.meter import Meter, Moment, Phase, Timer


class CountingTimer(Timer):
    """A clock that moves on by one whenever it is read."""

    def __init__(self) -> None:
        self.now = 0
        self.phase: Phase = "backward"
        self.begun: list[tuple[Phase, Moment]] = []
        self.hidden: list[tuple[Moment, Moment]] = []

    def begin(self, phase: Phase, at: Moment = None) -> Phase:
        before, self.phase = self.phase, phase
        self.begun.append((phase, at))
        return before

    def moment(self) -> Moment:
        self.now += 1
        return self.now

    def hide(self, begun: Moment, ended: Moment) -> None:
        self.hidden.append((begun, ended))


def test_messages_are_hidden_from_the_first_one_until_they_are_waited_for():
    timer = CountingTimer()
    meter = Meter(timer)
    meter.issued()
    meter.issued()
    with meter.awaited():
        assert timer.phase == "communication"
    assert timer.phase == "backward"
    assert timer.hidden == [(1, 3)]
    with meter.awaited():
        pass
    assert timer.hidden == [(1, 3)]


def test_a_backward_pass_waits_for_messages_after_the_last_one_was_issued():
    timer = CountingTimer()
    meter = Meter(timer)
    meter.issued()
    meter.issued()
    meter.backward_ended()
    assert timer.hidden == [(1, 2)]
    assert timer.begun == [("communication", 2)]
