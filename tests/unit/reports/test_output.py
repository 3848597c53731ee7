import random
import time

import pytest

from ddpnb.reports.merging import HOLD_SECONDS, Item, OutputMerger, Screen

Shown = list[tuple[list[int], Item]]


def merged(*outputs: str) -> Shown:
    """Merge what each rank wrote to stdout, all of it being there."""
    merger = OutputMerger(tuple(range(len(outputs))))
    for rank, text in enumerate(outputs):
        merger.write(rank, "stdout", text)
        merger.finish(rank)
    return taken(merger)


def taken(merger: OutputMerger) -> Shown:
    return [(ranks, item) for ranks, items in merger.take() for item in items]


def lines(shown: Shown) -> list[tuple[list[int], str]]:
    return [(ranks, item[1]) for ranks, item in shown]


def of_rank(shown: Shown, rank: int) -> list[str]:
    return [item[1] for ranks, item in shown if rank in ranks]


def test_equal_lines_are_shown_once_and_split_by_no_line_that_one_rank_has_more():
    shown = merged(*["a\n\nb\n"] * 3)
    assert lines(shown) == [([0, 1, 2], line) for line in ("a", "", "b")]
    shown = merged("start\nonly here\nend\n", "start\nend\n")
    assert lines(shown) == [([0, 1], "start"), ([0], "only here"), ([0, 1], "end")]


def test_every_rank_keeps_its_own_order_whatever_it_writes():
    generator = random.Random(0)
    for _ in range(50):
        wrote = [[generator.choice("abcd") for _ in range(generator.randrange(8))] for _ in "012"]
        shown = merged(*("".join(f"{line}\n" for line in rank) for rank in wrote))
        assert [of_rank(shown, rank) for rank in range(3)] == wrote


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
    assert merged("a\r\n") == [([0], ("stdout", "a"))], "a line's end on Windows"
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
    assert large < 70 * max(small, 0.01)  # linear: 10 times, quadratic: 100 times
    assert large < 3.0
