import pytest

from ddpnb.reports.cell_output import MAX_LINES, PrintedLines


def say(printed: PrintedLines, *texts: str) -> None:
    """Make a call in which each rank prints a text."""
    printed.end()
    for rank, text in enumerate(texts):
        printed.take(rank, "stream", {"name": "stdout", "text": text})


def shown(printed: PrintedLines, capsys: pytest.CaptureFixture[str]) -> list[str]:
    printed.show()
    return capsys.readouterr().out.splitlines()


def test_lines_of_ranks_and_calls_are_shown_once(capsys: pytest.CaptureFixture[str]):
    printed = PrintedLines()
    say(printed, "model\n---\nsizes\n---\n", "model\n---\nsizes\n---\n")
    say(printed, "model\n---\nother\n", "model\n")
    assert shown(printed, capsys) == [
        "Printed by the cell:",
        "[0-1] model",
        "[0-1] ---",
        "[0-1] sizes",
        "[0] other",
    ]


def test_many_lines_are_counted(capsys: pytest.CaptureFixture[str]):
    printed = PrintedLines()
    say(printed, "".join(f"{number}\n" for number in range(MAX_LINES + 120)))
    say(printed, "0\nmore\nunfinished")
    lines = shown(printed, capsys)
    assert len(lines) == MAX_LINES + 2
    assert lines[-1] == "... and 122 more lines"


def test_a_display_is_its_text(capsys: pytest.CaptureFixture[str]):
    printed = PrintedLines()
    printed.take(0, "display_data", {"data": {"text/html": "<b>x</b>", "text/plain": "x"}})
    printed.take(0, "clear_output", {"wait": True})
    assert shown(printed, capsys) == ["Printed by the cell:", "[0] x"]
    assert shown(PrintedLines(), capsys) == []
