from ddpnb.history.comparison import Comparison
from ddpnb.reports.live import LiveText
from tests.unit.history.fake_runs import fake_comparison


class Failing(LiveText):
    """Cannot draw at first."""

    num_drawn = 0

    def show_progress(self, comparison: Comparison) -> None:
        self.num_drawn += 1
        if self.num_drawn < 3:
            raise ValueError("no colour")
        super().show_progress(comparison)


def test_what_cannot_be_drawn_is_said_once_and_the_next_drawing_is_tried(capsys):
    live = Failing()
    for _ in range(4):
        live.update(fake_comparison())
    lines = capsys.readouterr().err.splitlines()
    assert "ValueError: no colour" in lines[0]
    assert lines[1:] == ["run 4 of 4: async"]
    assert not live.is_due()
