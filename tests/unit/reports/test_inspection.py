"""The pictures and texts of an inspection show the recorded spans. No rank takes part."""

import random
from dataclasses import replace

import pytest

from ddpnb.protocol.inspection import Bucket, CapReport
from ddpnb.protocol.messages import Mark, MarkKind, Parts
from ddpnb.protocol.trace import Span
from ddpnb.reports.inspection.buckets import DdpInspection, one_by_one
from ddpnb.reports.inspection.versions import async_inspection, updates_of
from ddpnb.results.run import RunSnapshot, Status
from tests.unit.results.fake_runs import batch, fake_comparison, header, run_of, spec, step

MS = 1e-3


def spans_of(rank: int, *, late: float = 0.0) -> tuple[Span, ...]:
    """Return a step of 10 ms, with 3 ms of bucket 0 hidden and 4 ms of communication exposed."""
    rows = [
        ("compute", "forward", 0, 2),
        ("compute", "backward", 2, 5),
        ("communication", "bucket 0", 2, 6, 900, (0, 1)),
        ("communication", "bucket 1", 5, 9, 100, (0, 1)),
        ("wait", "wait for buckets", 5, 9),
        ("compute", "update", 9, 10),
    ]
    names = ("lane", "name", "start", "end", "num_bytes", "group")
    spans = [Span(rank=rank, **dict(zip(names, row, strict=False))) for row in rows]
    return tuple(
        replace(span, start=(span.start + late) * MS, end=(span.end + late) * MS) for span in spans
    )


def inspection_of(num_ranks: int, num_buckets: int = 2, **others) -> DdpInspection:
    sizes = {f"layer.{n}.weight": 100 if n else 900 for n in range(num_buckets)}
    reports = []
    for rank in range(num_ranks):
        own = CapReport(
            cap_mb=25.0,
            buckets=tuple(Bucket(names=(name,), num_bytes=size) for name, size in sizes.items()),
            steps=tuple(spans_of(rank, late=late) for late in (0.0, 20.0, 40.0)),
            ready_seconds={name: MS * (1 + n) for n, name in enumerate(sizes)},
        )
        reports.append((own, replace(own, cap_mb=1.0)))
    return DdpInspection(title="net", reports=tuple(reports), **{"unused": {}, **others})


def test_a_bucket_is_drawn_from_the_end_of_the_one_ahead():
    drawn = {span.name: span for span in one_by_one(spans_of(0))}
    assert drawn["bucket 1"].start == drawn["bucket 0"].end == 6 * MS
    assert drawn["bucket 1"].end == 9 * MS


def test_a_step_with_each_size_is_shown_above_the_table():
    inspection = inspection_of(20, num_buckets=40, unused={"layer.1.weight": (1,)})
    html = inspection._repr_mimebundle_()["text/html"]
    assert (html.count("<img"), html.count("<table")) == (2, 1)
    own, other = inspection.table().rows
    assert (own[0].text, other[0].text) == ("25 MB (the model's)", "1 MB")
    assert [cell.text for cell in own[1:5]] == ["10.0 ms", "4.00 ms", "3.00 ms", "40"]
    assert own[5].text.startswith("900 B at 1.00 ms (layer.0.weight); 100 B at 2.00 ms (layer.1")
    assert "did not contribute to the loss on rank 1: layer.1.weight." in inspection.text()


# -- async ---------------------------------------------------------------------------------


def async_run(
    num_ranks: int, num_updates: int, *, skew: float = 0.0, strategy: str = "async", marks=()
) -> tuple[RunSnapshot, list[tuple[int, int, int]]]:
    """Return an async run, and for each update its true (rank, version read, version written)."""
    chance = random.Random(0)
    free_at = dict.fromkeys(range(num_ranks), 0.0)
    ends = {rank: 0.01 * (1 + chance.random()) for rank in free_at}
    read, steps, truth = dict.fromkeys(range(num_ranks), 0), {n: [] for n in free_at}, []
    for version in range(num_updates):
        rank = min(ends, key=ends.__getitem__)
        truth.append((rank, read[rank], version + 1))
        made = step(
            len(steps[rank]), ends[rank] + skew * rank, samples=8, staleness=version - read[rank]
        )
        parts = Parts(forward=0.005, backward=ends[rank] - free_at[rank] - 0.005)
        steps[rank].append(replace(made, version=version + 1, parts=parts))
        free_at[rank], read[rank] = ends[rank], version + 1
        ends[rank] += 0.01 * (1 + chance.random())
    run_spec = spec(strategy)
    run = run_of(run_spec, comparison="c")
    first = replace(header(run_spec, num_updates), num_workers=num_ranks)
    for rank, own in steps.items():
        more = {} if rank else {"header": first, "marks": marks}
        run.add(batch(run_spec.run_id, own, rank=rank, **more))
    run.end(Status.FINISHED)
    return run.snapshot(), truth


def test_versions_are_those_that_the_server_counted_however_the_clocks_differ():
    run, truth = async_run(8, 200, skew=0.03)
    assert updates_of(run)[["rank", "read", "version"]].tolist() == truth


@pytest.mark.parametrize("num_ranks", [2, 20])
def test_versions_are_drawn_with_a_death_and_for_many_workers(num_ranks: int):
    mark = Mark(rank=1, seconds=0.1, kind=MarkKind.KILLED)
    run, truth = async_run(num_ranks, 300, marks=(mark,), strategy="async:bound=3")
    inspection = async_inspection(fake_comparison(()).with_runs([run]))
    lanes, arrows = (
        [each.get_text() for each in axes.texts] for axes in inspection.plot().figure.axes
    )
    assert "   killed" in lanes
    assert inspection.bound == 3
    for rank in range(2):  # figure and text must show the same mean
        own = [written - 1 - read for who, read, written in truth if who == rank]
        about = inspection.about(rank)
        assert about.startswith(f"{len(own)} gradients, ")
        assert float(about.split()[-1]) == pytest.approx(sum(own) / len(own), rel=0.05)
        assert about in arrows
        assert f"rank {rank}: {about}" in inspection.text()
