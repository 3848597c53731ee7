"""Does a trace hold what the ranks have really sent, whoever has called?"""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddpnb.protocol.trace import COLLECTIVES, CollectiveSpec, RankSpans
from ddpnb.rank.trace.collectives import bytes_sent, show
from ddpnb.rank.trace.recorder import recording
from ddpnb.reports.inside.collective import CollectiveResult, all_sent
from ddpnb.reports.inside.traces import chrome_trace, joined

SIZE = 30_000


def calls_of_all_kinds(state, folder) -> tuple[RankSpans, int]:
    """By methods, by DDP and FSDP from C++, in inference mode; with the bytes on the sockets."""
    num, rank = state.world_size, state.rank
    dist.barrier()
    before = bytes_sent()
    with recording(rank) as recorder:
        mine = torch.full((SIZE,), float(rank))
        parts = [torch.zeros(SIZE) for _ in range(num)]
        dist.all_reduce(mine)
        dist.all_reduce(mine, async_op=True).wait()
        dist.broadcast(mine, 1)
        dist.reduce(mine, 1)
        dist.scatter(mine, parts if rank == 2 else None, 2)
        dist.gather(mine, parts if rank == 0 else None, 0)
        dist.all_gather(parts, mine)
        dist.reduce_scatter(mine, parts)
        dist.all_to_all(parts, [each.clone() for each in parts])
        with torch.inference_mode():
            dist.all_reduce(mine)
            dist.all_reduce(torch.ones(SIZE))
        if rank == 0:
            dist.send(mine, 1)
        elif rank == 1:
            dist.recv(mine)
        model = DistributedDataParallel(nn.Linear(200, 100))
        for _ in range(2):
            model(torch.ones(4, 200)).sum().backward()
        sharded = nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 120))
        fully_shard(sharded)
        sharded(torch.ones(2, 120)).sum().backward()
        dist.barrier()
        spans = recorder.spans()
    assert before is not None
    return spans, bytes_sent() - before


@pytest.fixture(scope="module")
def recorded(ranks):
    return ranks(3).call(calls_of_all_kinds)


def test_traced_bytes_are_those_on_the_sockets(recorded):
    by_formula = sum(all_sent(span) for spans, _ in recorded for span in spans.spans)
    counted = sum(num_bytes for _, num_bytes in recorded)
    assert by_formula <= counted <= 1.02 * by_formula + 100_000


def test_every_call_is_recorded_once(recorded):
    first, second, third = ([span.name for span in spans.spans] for spans, _ in recorded)
    usual = [name for name in first if name != "send"]
    assert usual == [name for name in second if name != "recv"] == third
    assert first.count("all_reduce") >= 4 + 2  # its own, and one of each backward pass
    assert {"all_gather_single", "reduce_scatter_single"} <= set(first)  # FSDP's
    assert all(spans.num_open == spans.num_dropped == 0 for spans, _ in recorded)
    (message,) = (span for span in recorded[1][0].spans if span.name == "recv")
    assert message.group == (0, 1)


def late(state, folder) -> RankSpans:
    with recording(state.rank) as recorder:
        if state.rank == 1:
            time.sleep(0.2)
        dist.barrier()
        return recorder.spans()


def test_ranks_wait_for_the_one_that_is_late(ranks):
    trace = joined("late", ranks(3).call(late), hosts=["here"] * 3)
    begin = {span.rank: span.start for span in trace.spans}
    assert begin[1] > max(begin[0], begin[2])
    waits = [e for e in chrome_trace(trace)["traceEvents"] if e.get("cat") == "wait"]
    assert {e["pid"] for e in waits} >= {1, 3}  # of ranks 0 and 2
    assert any("Recording costs" in note for note in trace.notes)


def many(state, folder) -> RankSpans:
    with recording(state.rank, max_spans=10) as recorder:
        for _ in range(25):
            dist.all_reduce(torch.ones(1))
        return recorder.spans()


def test_a_trace_is_bounded_and_says_so(ranks):
    found = ranks(3).call(many)
    assert [(len(each.spans), each.num_dropped) for each in found] == [(10, 15)] * 3


def with_a_store(state, folder) -> RankSpans:
    with recording(state.rank) as recorder:
        group = dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(1), group=group)
        spans = recorder.spans()
    dist.all_reduce(torch.ones(1), group=group)  # the group outlives the trace
    dist.destroy_process_group(group)
    return spans


def test_the_store_shows_how_a_group_is_formed(ranks):
    found = ranks(3).call(with_a_store)
    for each in found:
        store = [span for span in each.spans if span.lane == "store"]
        assert {"set", "get", "wait"} <= {span.name for span in store}
    keys = [{s.key for s in each.spans if s.name == "set"} for each in found]
    assert not keys[0] & keys[1]  # each rank's own address


def untraced(state, folder) -> bool:
    before = dist.Store.set
    with recording(state.rank) as recorder:
        pass
    dist.barrier()
    return not recorder.spans().spans and dist.Store.set is before


def test_nothing_is_heard_afterwards(ranks):
    assert ranks(2).call(untraced) == [True, True]


def by_torch(state, folder) -> dict:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(1000))
    path = folder / f"profile-{state.rank}.json"
    profiler.export_chrome_trace(str(path))
    text = path.read_text()
    path.unlink()
    return json.loads(text)


def test_the_file_is_built_as_that_of_torchs_profiler(ranks):
    torchs, _ = ranks(2).call(by_torch)
    ours = chrome_trace(joined("one", ranks(2).call(one_call), hosts=["here"] * 2))
    assert {"schemaVersion", "traceEvents"} <= torchs.keys() & ours.keys()
    for kind in ("X", "M"):
        theirs = next(e for e in torchs["traceEvents"] if e["ph"] == kind)
        mine = [e for e in ours["traceEvents"] if e["ph"] == kind]
        assert mine
        assert all(theirs.keys() - {"cat"} <= each.keys() | {"args"} for each in mine)


def one_call(state, folder) -> RankSpans:
    with recording(state.rank) as recorder:
        dist.all_reduce(torch.ones(1000))
        return recorder.spans()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_shown_sends_what_its_formula_says(ranks, name):
    spec = CollectiveSpec(name=name, ranks=(0, 1, 2), num_bytes=240_000)
    result = CollectiveResult(spec, ranks(3).call(shown, spec))
    for each in result.shown:
        assert each.num_bytes_sent == pytest.approx(result.sent_by_formula(each.rank), abs=8_000)


def test_numbers_show_where_they_come_from(ranks):
    def after(**options):
        found = ranks(3).call(shown, CollectiveSpec(ranks=(0, 1, 2), **options))
        return [each.after for each in found]

    assert after(name="all_reduce") == [((60, 63, 66, 69),)] * 3
    assert after(name="all_reduce", op="avg") == [((20, 21, 22, 23),)] * 3
    assert after(name="broadcast", root=1) == [((20, 21, 22, 23),)] * 3
    assert after(name="reduce", op="max", root=2) == [(), (), ((30, 31, 32, 33),)]
    assert after(name="scatter", root=2) == [((30, 31),), ((32, 33),), ((34, 35),)]
    assert after(name="reduce_scatter", op="min") == [((10, 11),), ((12, 13),), ((14, 15),)]
    assert after(name="all_to_all")[1] == ((12, 13), (22, 23), (32, 33))
    assert after(name="send", root=1) == [(), ((20, 21, 22, 23),), ((20, 21, 22, 23),)]


def shown(state, folder, spec: CollectiveSpec):
    return show(spec, device=torch.device("cpu"))
