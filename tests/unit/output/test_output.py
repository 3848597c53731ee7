import random
import time

import pytest

from ddpnb.output.cell_output import MAX_PRINTED_LINES, CellOutput, PrintedLines
from ddpnb.output.displays import Displays, label_of
from ddpnb.output.merging import HOLD_SECONDS, Item, OutputMerger, Screen
from ddpnb.reports.live import LiveText
from ddpnb.results.comparison import Comparison
from tests.unit.results.fake_runs import fake_comparison

Shown = list[tuple[list[int], Item]]


def merged(*outputs: str) -> Shown:
    merger = OutputMerger(tuple(range(len(outputs))))
    for rank, text in enumerate(outputs):
        merger.write(rank, "stdout", text)
        merger.finish(rank)
    return taken(merger)


def taken(merger: OutputMerger) -> Shown:
    return [(ranks, item) for ranks, items in merger.take() for item in items]


def lines(shown: Shown) -> list[tuple[list[int], str]]:
    return [(ranks, item[1]) for ranks, item in shown]


def test_equal_lines_are_shown_once_and_split_by_no_line_that_one_rank_has_more():
    shown = merged(*["a\n\nb\n"] * 3)
    assert lines(shown) == [([0, 1, 2], line) for line in ("a", "", "b")]
    more, less = "start\nonly here\nend\n", "start\nend\n"
    for rank, wrote in enumerate(((more, less), (less, more))):
        shown = lines(merged(*wrote))
        assert shown == [([0, 1], "start"), ([rank], "only here"), ([0, 1], "end")]


def test_every_rank_keeps_its_own_order_whatever_it_writes():
    generator = random.Random(0)
    for _ in range(50):
        wrote = [[generator.choice("abcd") for _ in range(generator.randrange(8))] for _ in "012"]
        shown = lines(merged(*("".join(f"{line}\n" for line in rank) for rank in wrote)))
        for rank in range(3):
            assert [line for ranks, line in shown if rank in ranks] == wrote[rank]


def test_a_line_waits_for_the_same_line_of_a_running_rank_but_not_for_long():
    merger = OutputMerger((0, 1))
    merger.write(0, "stdout", "loss 0.5\n")
    assert taken(merger) == []
    merger.write(1, "stdout", "loss 0.5\n")
    assert lines(taken(merger)) == [([0, 1], "loss 0.5")]
    merger.write(0, "stdout", "alone\n")
    began = time.monotonic()
    while not (shown := taken(merger)):
        assert time.monotonic() - began < 10 * HOLD_SECONDS
        time.sleep(0.01)
    assert lines(shown) == [([0], "alone")]
    assert time.monotonic() - began >= 0.8 * HOLD_SECONDS


def test_displays_of_all_ranks_are_merged_also_if_other_cells_begin():
    draw = random.Random(0)
    cells = [CellOutput((0, 1)) for _ in range(3)]
    for _ in range(100):
        cells += [CellOutput((0, 1))] * draw.randrange(2)
        cell, text = draw.choice(cells[-3:]), draw.choice("ab")
        for rank in (0, 1):
            transient = {"display_id": f"{draw.getrandbits(128):032x}"}
            content = {"data": {"text/plain": text}, "transient": transient}
            cell.take(rank, "display_data", content)
            CellOutput((0, 1)).take(rank, "display_data", content | {"transient": {}})
        ((ranks, _),) = cell._merger.take(at_once=True)
        assert ranks == [0, 1]


def test_each_content_of_a_display_is_in_one_place_with_the_label_of_its_ranks():
    draw, displays = random.Random(0), Displays()
    wanted: dict[int, str] = {}
    for _ in range(300):
        ranks = draw.sample(range(4), draw.randint(1, 4))
        content = {"data": {"text/plain": draw.choice("abc")}, "transient": {"display_id": "it"}}
        _, text = displays.item(ranks[0], "display", content, 0)
        if any(rank not in wanted for rank in ranks):
            displays.show(ranks, "it", text)
            wanted |= dict.fromkeys(ranks, text)
        displays.update(ranks, "it", text)
        wanted |= dict.fromkeys(ranks, text)
        places = [place.shown for place in displays._places["it"].values() if place.shown[0]]
        by_content = {text: [r for r in wanted if wanted[r] == text] for text in wanted.values()}
        assert sorted(places) == sorted((label_of(on), text) for text, on in by_content.items())


def test_stdout_and_stderr_are_different_lines():
    merger = OutputMerger((0, 1))
    for rank, stream in enumerate(("stdout", "stderr")):
        merger.write(rank, stream, "x\n")
        merger.finish(rank)
    assert taken(merger) == [([0], ("stdout", "x")), ([1], ("stderr", "x"))]


def test_a_line_may_come_in_pieces():
    merger = OutputMerger((0,))
    merger.write(0, "stdout", "on")
    assert taken(merger) == []
    merger.write(0, "stdout", "e\ntwo\nthr")
    assert lines(taken(merger)) == [([0], "one"), ([0], "two")]
    assert merger.unfinished() == {"thr": [0]}
    merger.finish(0)
    assert lines(taken(merger)) == [([0], "thr")]
    assert merger.unfinished() == {}


def test_a_bar_is_its_last_state():
    merger = OutputMerger((0, 1))
    merger.write(0, "stderr", "\r 0%|   |\r50%|== |")
    merger.write(1, "stderr", "\r 0%|   |\r50%|== |")
    assert merger.unfinished() == {"50%|== |": [0, 1]}
    assert taken(merger) == []
    for rank in (0, 1):
        merger.write(rank, "stderr", "\r100%|===|\n")
        merger.finish(rank)
    assert taken(merger) == [([0, 1], ("bar", "100%|===|"))]
    assert merger.unfinished() == {}


OUTER, INNER, UP = "\router 1/2", "\rinner 3/4", "\x1b[A"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_bars_below_each_other_are_drawn_where_they_stand(size: int):
    screen = Screen("stderr")
    text = f"\router 0/2\n\rinner 0/4{UP}\n{INNER}{UP}{OUTER}\n\r         \r{UP}"
    shown: list[list[str]] = []
    for begin in range(0, len(text), size):
        assert screen.write(text[begin : begin + size]) == []
        shown.append(screen.lines())
    assert shown[-1] == ["outer 1/2"]
    assert screen.write("\router 2/2\n") == []
    assert screen.rest() == [("bar", "outer 2/2")]


def test_a_plain_line_below_bars_finishes_them():
    screen = Screen("stderr")
    assert screen.write("\r1/1\nplain\n\r2/2") == [("bar", "1/1"), ("stderr", "plain")]
    assert screen.lines() == ["2/2"]
    assert merged("a\r\n") == [([0], ("stdout", "a"))], "a Windows line end"
    assert Screen("stdout").write("\x1b[31mred\x1b[0m\n") == [("stdout", "\x1b[31mred\x1b[0m")]


@pytest.mark.parametrize("same", [True, False])
def test_much_output_takes_linear_time(same: bool):
    def seconds(num_lines: int) -> float:
        texts = [
            "".join(f"line {i} of {0 if same else rank}\n" for i in range(num_lines))
            for rank in range(2)
        ]
        began = time.process_time()
        shown = merged(*texts)
        took = time.process_time() - began
        assert len(shown) == num_lines * (1 if same else 2)
        return took

    small, large = (min(seconds(n) for _ in range(3)) for n in (4_000, 40_000))
    assert large < 70 * max(small, 0.01)  # 10 times if linear, 100 times if quadratic
    assert large < 3.0


def say(printed: PrintedLines, *texts: str) -> None:
    """Simulate a call in which each rank prints a text."""
    printed.end()
    for rank, text in enumerate(texts):
        printed.take(rank, "stream", {"name": "stdout", "text": text})


def lines_of(printed: PrintedLines, capsys: pytest.CaptureFixture[str]) -> list[str]:
    printed.show()
    return capsys.readouterr().out.splitlines()


def test_lines_of_ranks_and_calls_are_shown_once(capsys: pytest.CaptureFixture[str]):
    printed = PrintedLines()
    say(printed, "model\n---\nsizes\n---\n", "model\n---\nsizes\n---\n")
    say(printed, "model\n---\nother\n", "model\n")
    assert lines_of(printed, capsys) == [
        "Printed by the cell:",
        "[0-1] model",
        "[0-1] ---",
        "[0-1] sizes",
        "[0] other",
    ]


def test_many_lines_are_counted(capsys: pytest.CaptureFixture[str]):
    printed = PrintedLines()
    say(printed, "".join(f"{number}\n" for number in range(MAX_PRINTED_LINES + 120)))
    say(printed, "0\nmore\nunfinished")
    lines = lines_of(printed, capsys)
    assert len(lines) == MAX_PRINTED_LINES + 2
    assert lines[-1] == "... and 122 more lines"


def test_a_display_is_its_text(capsys: pytest.CaptureFixture[str]):
    printed = PrintedLines()
    printed.take(0, "display_data", {"data": {"text/html": "<b>x</b>", "text/plain": "x"}})
    printed.take(0, "clear_output", {"wait": True})
    assert lines_of(printed, capsys) == ["Printed by the cell:", "[0] x"]
    assert lines_of(PrintedLines(), capsys) == []


class Failing(LiveText):
    """A display that fails to draw twice."""

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
