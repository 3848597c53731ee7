"""A trace has all bytes that the ranks sent, from calls in Python and in C++."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.costs import algorithm_of
from ddpnb.protocol.processes import portable
from ddpnb.protocol.trace import ROOTED, SHOWN, CollectiveSpec, RankSpans, Span
from ddpnb.rank.clock import MeasuredClock
from ddpnb.rank.collectives import trace
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.collectives.trace import TraceRecorder
from ddpnb.rank.connections import bytes_sent
from ddpnb.rank.inspection import collective
from ddpnb.rank.inspection.collective import run_collective
from ddpnb.reports.inspection.collective import CollectiveResult

SIZE = 30_000


def calls_of_all_kinds(state, folder) -> tuple[RankSpans, int | None, int]:
    """Call collectives by methods, in inference mode, and by DDP and FSDP from C++. Return the
    spans, the bytes on the sockets, and the bytes in a run's account."""
    from torch.distributed.fsdp import fully_shard  # takes a second

    num, rank, clock = state.world_size, state.rank, MeasuredClock(torch.device("cpu"))
    model = DistributedDataParallel(nn.Linear(200, 100))
    dist.barrier()
    before = bytes_sent()
    with listening(TraceRecorder(rank)) as recorder, listening(clock):
        mine = torch.full((SIZE,), float(rank))
        parts = [torch.zeros(SIZE) for _ in range(num)]
        dist.all_reduce(mine, async_op=True).wait()
        dist.broadcast(mine, 1)
        dist.reduce(mine, 1)
        dist.scatter(mine, parts if rank == 2 else None, 2)
        dist.gather(mine, parts if rank == 0 else None, 0)
        dist.all_gather(parts, mine)
        dist.reduce_scatter(mine, parts)
        dist.all_to_all_single(torch.zeros(num * SIZE), torch.cat(parts))
        with torch.inference_mode():
            dist.all_reduce(mine)
            dist.all_reduce(torch.ones(SIZE))
        if rank == 0:
            dist.send(mine, 1)
        elif rank == 1:
            dist.recv(mine, 0)
        for _ in range(2):
            model(torch.ones(4, 200)).sum().backward()
        sharded = nn.Sequential(nn.Linear(120, 120), nn.Linear(120, 120))
        fully_shard(sharded)
        sharded(torch.ones(2, 120)).sum().backward()
        dist.barrier()
        spans = recorder.spans()
    counted = None if portable() else bytes_sent() - before
    return spans, counted, clock.take()[0]


def sent_by_formula(span: Span, *backend: str) -> float:
    """Return the bytes that all ranks send for a call, divided by the number of these ranks."""
    algorithm, num = algorithm_of(span.name, *backend), len(span.group)
    if span.name == "send":
        return float(span.num_bytes or 0)
    if algorithm is None or not span.num_bytes:
        return 0.0
    return sum(algorithm.of(span.num_bytes, num, place).sent for place in range(num)) / num


def test_every_call_is_recorded_once_with_the_bytes_on_the_sockets(ranks):
    recorded = ranks(3).call(calls_of_all_kinds)
    spans = [span for each, *_ in recorded for span in each.spans]
    by_formula = sum(sent_by_formula(span, "gloo") for span in spans)
    accounted = sum(each[2] for each in recorded)
    if not portable():
        assert by_formula <= sum(each[1] for each in recorded) <= 1.02 * by_formula + 100_000
    assert accounted == pytest.approx(sum(map(sent_by_formula, spans)), rel=1e-3)
    first, second, third = ([span.name for span in spans.spans] for spans, *_ in recorded)
    usual = [name for name in first if name != "send"]
    assert usual == [name for name in second if name != "recv"] == third
    assert first.count("all_reduce") >= 3 + 2  # 3 direct calls, one per backward pass
    assert {"all_gather_single", "reduce_scatter_single"} <= set(first)  # FSDP's
    assert all(spans.num_open == spans.num_dropped == 0 for spans, *_ in recorded)
    (message,) = (span for span in recorded[1][0].spans if span.name == "recv")
    assert message.group == (0, 1)


def open_after_backward(state, folder) -> int:
    model, num_open = DistributedDataParallel(nn.Linear(200, 100)), 0
    for _ in range(50):
        with listening(TraceRecorder(state.rank)) as recorder:
            model(torch.ones(4, 200)).sum().backward()
        num_open += recorder.spans().num_open
    return num_open


def test_what_is_complete_is_not_called_open(ranks):
    assert ranks(2).call(open_after_backward) == [0, 0]


def recorded(state, folder, calls) -> RankSpans:
    with listening(TraceRecorder(state.rank)) as recorder:
        calls(state.rank)
        return recorder.spans()


def too_many(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace, "MAX_SPANS", 10)
        for _ in range(25):
            dist.all_reduce(torch.ones(1))


def test_a_trace_is_bounded_and_counts_the_rest(ranks):
    found = ranks(3).call(recorded, too_many)
    assert [(len(each.spans), each.num_dropped) for each in found] == [(10, 15)] * 3


def shown(state, folder, spec: CollectiveSpec):
    return run_collective(spec, device=torch.device("cpu"))


def test_a_collective_shown_counts_the_bytes_on_the_sockets(ranks):
    spec = CollectiveSpec(name="gather", ranks=(0, 1, 2), num_bytes=240_000)
    result = CollectiveResult(spec, ranks(3).call(shown, spec))
    assert portable() == ("The bytes are computed" in result.text())
    for each in result.shown:
        by_formula = pytest.approx(result.sent_by_formula(each.rank), abs=8_000)
        assert each.num_bytes_sent == (None if portable() else by_formula)


NUMBERS = 20 * 2520
"""Each of 1 to 9 ranks divides it."""


def bytes_of_all(state, folder) -> dict[tuple[str, int], tuple[int, int, int | None]]:
    """Return the bytes that this rank sent and received in each collective, by name and root.

    The clock of a run has counted the first two numbers. The third is from the sockets.
    """
    clock, num, found = MeasuredClock(torch.device("cpu")), state.world_size, {}
    for name in SHOWN:
        for root in range(num if name in ROOTED else 1):
            given = {"root": root} if name in ROOTED else {}
            spec = CollectiveSpec(name=name, ranks=tuple(range(num)), **given)
            *_, call = collective._call(spec, dist.group.WORLD, NUMBERS, torch.device("cpu"))
            dist.barrier()
            before = bytes_sent()
            with listening(clock):
                call()
            counted = None if before is None else bytes_sent() - before
            found[name, root] = *clock.take(), counted
    return found


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_clock_formula_and_sockets_count_the_same_bytes_of_every_collective(ranks, num_ranks):
    found = ranks(num_ranks).call(bytes_of_all)
    for name, root in found[0]:
        for rank, each in enumerate(found):
            sent, received, on_sockets = each[name, root]
            place = (rank - root) % num_ranks
            usual, by_gloo = (algorithm_of(name, how) for how in ("", "gloo"))
            cost = usual.of(4 * NUMBERS, num_ranks, place)
            assert (sent, received) == pytest.approx((cost.sent, cost.received), abs=1), name
            if on_sockets is not None:
                expected = by_gloo.of(4 * NUMBERS, num_ranks, place).sent
                headers = 600 * num_ranks**2
                assert on_sockets == pytest.approx(expected, abs=headers), name
        all_sent, all_received, _ = zip(*(each[name, root] for each in found), strict=True)
        assert sum(all_sent) == pytest.approx(sum(all_received), abs=num_ranks), name


TENS = [((10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3),) for rank in (1, 2, 3)]


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ({"name": "all_reduce"}, [((60, 63, 66, 69),)] * 3),
        ({"name": "reduce", "op": "max", "root": 2}, [(), (), TENS[2]]),
        ({"name": "all_gather"}, [tuple(each[0][:2] for each in TENS)] * 3),
        pytest.param(
            *({"name": "reduce_scatter", "op": "min"}, [((10, 11),), ((12, 13),), ((14, 15),)]),
            marks=pytest.mark.skipif(
                torch.__version__ < "2.11", reason="gloo of torch 2.8 always sums here"
            ),
        ),
        (
            {"name": "all_to_all"},
            [tuple((n + k, n + k + 1) for n in (10, 20, 30)) for k in (0, 2, 4)],
        ),
        ({"name": "barrier"}, [(), (), ()]),
    ],
)
def test_numbers_show_where_they_come_from(ranks, given, after):
    found = ranks(3).call(shown, CollectiveSpec(ranks=(0, 1, 2), **given))
    assert [each.after for each in found] == after
