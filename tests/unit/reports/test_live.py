from ddpnb.reports.live import DrawingGuard


def test_what_cannot_be_drawn_is_said_once_and_the_next_drawing_is_tried(capsys):
    guard, drawn = DrawingGuard(), []

    def fail() -> None:
        raise ValueError("no colour")

    guard.draw(fail)
    guard.draw(fail)
    guard.draw(lambda: drawn.append(1))
    assert drawn == [1]
    assert capsys.readouterr().err.count("ValueError: no colour") == 1
