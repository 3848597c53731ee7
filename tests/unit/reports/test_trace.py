"""Traces as pictures, texts, tables and files, without a cluster."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.trace import CollectiveShown, CollectiveSpec, RankSpans, Span
from ddpnb.reports.inspection.collective import CollectiveResult
from ddpnb.reports.inspection.timeline import last_arrivals
from ddpnb.reports.inspection.traces import TraceResult, chrome_trace, join_traces


def call(rank: int, start: float, end: float, name: str = "all_reduce", **options) -> Span:
    options = {"group": (0, 1), "num_bytes": 4000, "line": "line 3"} | options
    return Span(rank=rank, lane="communication", name=name, start=start, end=end, **options)


def trace_of(*spans: Span, num_ranks: int = 2) -> TraceResult:
    return TraceResult(title="Cell 3 on 2 ranks", num_ranks=num_ranks, spans=spans)


HERE = ["here", "here"]
TWO = trace_of(call(0, 1.0, 1.5), call(1, 1.3, 1.5), call(0, 1.6, 1.7), call(1, 1.6, 1.7))


def ranks_in(figure) -> list[str]:
    found = [each.get_text() for axes in figure.axes for each in axes.texts]
    return [text for text in found if text.startswith("rank ")]


SUB = [call(0, 0.0, 2.0, group=(0, 2)), call(2, 0.9, 2.0, group=(0, 2))]


@pytest.mark.parametrize(
    ("spans", "until"),
    [
        (TWO.spans, [1.3, 1.3, 1.6, 1.6]),  # the early rank waits for the last rank
        ([*SUB, *TWO.spans], [0.9, 0.9, 1.3, 1.3, 1.6, 1.6]),  # only within its group
        ([call(0, 1, 3), call(1, 2, 3, "broadcast")], [1, 2]),  # different calls do not meet
        ([call(0, 1, 1.2, "broadcast"), call(1, 2, 2.1, "broadcast")], [1, 2]),  # a root is done
        ([call(0, 2, 3, "send"), call(1, 1, 3, "recv")], [2, 2]),
        ([call(0, 1, 3, "send"), call(1, 2, 3, "recv")], [1, 2]),  # a sender does not wait
    ],
)
def test_until_when_each_call_waited(spans: list[Span], until: list[float]):
    assert last_arrivals(spans) == until


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_every_rank_has_its_row_up_to_sixteen(num_ranks: int):
    group = tuple(range(num_ranks))
    spans = [call(rank, 1.0 + rank / 100, 1.9, group=group) for rank in group]
    spans += [replace(span, lane="compute", start=0.5, end=1.0) for span in spans]
    figure = trace_of(*spans, num_ranks=num_ranks).plot().figure
    assert ranks_in(figure) == [f"rank {rank}" for rank in range(min(num_ranks, 16))]
    assert figure.get_size_inches()[1] < 14


def test_the_text_says_who_waited_and_how_long_and_is_shortened():
    line = "rank 0 all_reduce, 500 ms, 300 ms of it waiting for the last rank, 4.0 kB, ranks 0-1"
    assert line in TWO.text()
    many = trace_of(*(call(rank, k, k + 0.5) for k in range(2_000) for rank in (0, 1)))
    assert many.text().endswith("and 3,960 more calls")


def test_the_file_has_a_process_per_rank_and_no_spans_that_cross():
    overlapping = [*TWO.spans, call(0, 1.4, 1.9, "broadcast"), call(1, 1.4, 1.9, "broadcast")]
    events = json.loads(json.dumps(chrome_trace(trace_of(*overlapping))))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    spans = [e for e in events if e["ph"] == "X" and e["cat"] == "communication"]
    wanted = {"bytes": 4000, "line": "line 3", "Process Group Ranks": [0, 1]}
    assert wanted.items() <= spans[0]["args"].items()
    threads: dict = {}
    for each in sorted(spans, key=lambda e: e["ts"]):
        place = each["pid"], each["tid"]
        assert each["ts"] >= threads.get(place, 0)
        threads[place] = each["ts"] + each["dur"]


def test_a_trace_is_saved_as_the_ending_says(tmp_path: Path):
    starts = {".json": b'{"schemaVersion"', ".png": b"\x89PNG", ".svg": b"<?xml"}
    starts |= {".html": b"<!doctype html>", ".txt": b"Cell 3 on 2 ranks"}
    for ending in TraceResult.endings:
        TWO.save(tmp_path / f"trace{ending}")
        assert (tmp_path / f"trace{ending}").read_bytes().startswith(starts[ending])


def test_a_cell_without_collectives_is_one_sentence():
    result = join_traces("Cell 1", [RankSpans(rank=0, spans=())], hosts=HERE)
    assert list(result._repr_mimebundle_()) == ["text/plain"]
    with pytest.raises(UserError, match="nothing to draw"):
        result.plot()


def test_what_is_not_known_is_said_and_clocks_of_several_hosts_are_brought_together():
    open_one = RankSpans(rank=0, spans=(call(0, 1, 2),), num_open=1)
    notes = join_traces("Cell 1", [open_one], hosts=HERE).notes
    records = "Rank 1 sent no records, so its calls are missing."
    assert notes[1:3] == (records, "1 call had not ended when the cell ended.")
    assert len(join_traces("Cell 1", [open_one], hosts=HERE, ranks=[0]).notes) == len(notes) - 1
    recorded = [
        RankSpans(rank=0, spans=(call(0, 100.0, 101.0),), clock_at=1000.0),
        RankSpans(rank=1, spans=(call(1, 5.5, 6.0),), clock_at=1095.0),
    ]
    trace = join_traces("Cell 1", recorded, hosts=["one", "two"])
    assert [span.start for span in trace.spans] == [100.0, 100.5]


# -- one collective ------------------------------------------------------------------------


def shown(num_ranks: int) -> CollectiveResult:
    spec = CollectiveSpec(name="all_gather", ranks=tuple(range(num_ranks)))
    of_rank = [
        CollectiveShown(
            rank=rank,
            before=((10.0 * (rank + 1),),),
            after=tuple((10.0 * (other + 1),) for other in range(num_ranks)),
            num_given=1_000_000,
            num_got=1_000_000 * num_ranks,
            seconds=0.004,
            small_seconds=0.001,
            num_bytes_sent=None,
            backend="gloo",
        )
        for rank in range(num_ranks)
    ]
    return CollectiveResult(spec, of_rank)


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_a_collective_is_drawn_up_to_sixteen_ranks(num_ranks: int):
    result = shown(num_ranks)
    assert len(ranks_in(result.plot().figure)) == min(num_ranks, 16)
    assert ("Bandwidth-bound at this size" in result.text()) == (num_ranks > 1)
