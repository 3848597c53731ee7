"""Do the pictures and words of an inspection say what was recorded?  No rank takes part."""

import io
import random
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from PIL import Image

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot, Status
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import (
    Bucket,
    CapReport,
    DdpReport,
    ParameterSize,
)
from ddpnb.protocol.messages import Mark, MarkKind, Parts, StepEvent
from ddpnb.protocol.trace import Span
from ddpnb.reports.inside.buckets import DdpInspection, buckets_text, one_by_one, split_of
from ddpnb.reports.inside.versions import async_inspection, steps_ahead, updates_of
from tests.unit.history.fake_runs import batch, header, run_of, spec

MS = 1e-3


def spans_of(rank: int, *, late: float = 0.0) -> tuple[Span, ...]:
    """A step of 10 ms: bucket 0 hides for 3 ms, bucket 1 and the end of 0 are exposed for 4."""
    group = (0, 1)

    def span(lane, name, start, end, num_bytes=None):
        return Span(
            rank=rank,
            lane=lane,
            name=name,
            start=(start + late) * MS,
            end=(end + late) * MS,
            num_bytes=num_bytes,
            group=group if lane == "communication" else (),
        )

    return (
        span("compute", "forward", 0, 2),
        span("compute", "backward", 2, 5),
        span("communication", "bucket 0", 2, 6, 900),
        span("communication", "bucket 1", 5, 9, 100),
        span("wait", "wait for buckets", 5, 9),
        span("compute", "update", 9, 10),
    )


def report_of(rank: int, num_buckets: int = 2) -> DdpReport:
    names = [f"layer.{n}.weight" for n in range(num_buckets)]
    sizes = [900, *[100] * (num_buckets - 1)]
    buckets = tuple(
        Bucket(names=(name,), num_bytes=size) for name, size in zip(names, sizes, strict=True)
    )
    cap = CapReport(
        cap_mb=25.0,
        buckets=buckets,
        steps=(spans_of(rank), spans_of(rank, late=20.0), spans_of(rank, late=40.0)),
        ready_seconds={name: MS * (1 + n) for n, name in enumerate(names)},
    )
    return DdpReport(
        rank=rank,
        caps=(cap, replace(cap, cap_mb=1.0)),
    )


def inspection_of(num_ranks: int, num_buckets: int = 2, **others) -> DdpInspection:
    sizes = [900, *[100] * (num_buckets - 1)]
    return DdpInspection(
        title="net",
        parameters=tuple(
            ParameterSize(name=f"layer.{n}.weight", shape=(3, 3), num_bytes=size)
            for n, size in enumerate(sizes)
        ),
        unused=others.pop("unused", {}),
        reports=tuple(report_of(rank, num_buckets) for rank in range(num_ranks)),
        **others,
    )


def test_communication_is_hidden_where_the_rank_computes_and_exposed_elsewhere():
    split = split_of([*spans_of(0), *spans_of(1)], 2)
    assert split.step == pytest.approx(10 * MS)
    assert split.hidden == pytest.approx(3 * MS)
    assert split.exposed == pytest.approx(4 * MS)
    assert inspection_of(2).split() == pytest.approx(split)


def test_a_bucket_is_drawn_from_the_end_of_the_one_ahead():
    drawn = {span.name: span for span in one_by_one(spans_of(0))}
    assert drawn["bucket 1"].start == drawn["bucket 0"].end == 6 * MS
    assert drawn["bucket 1"].end == 9 * MS


def test_what_stands_out_is_said_in_words():
    words = " ".join(inspection_of(2).words())
    assert "Bucket 0 holds 90 % of the bytes, nearly everything" in words
    assert "layer.0.weight has its gradient, and the last 50 % of the backward pass is" in words
    assert (
        "carry 1,000 bytes of each rank's gradients; the parameters that need one have 1,000"
        in (words)
    )
    unused = inspection_of(2, unused={"layer.1.weight": (1,)}, devices="8 emulated V100")
    words = " ".join(unused.words())
    assert "layer.1.weight has no part in the loss on rank 1" in words
    assert "On 8 emulated V100 time is computed" in words
    assert "8 emulated V100" in unused.trace().title
    assert "layer.1.weight (3 x 3), 100 B, no gradient" in buckets_text(unused)
    assert "All gradients share one bucket" in " ".join(inspection_of(2, num_buckets=1).words())
    assert [row[0].text for row in unused.table().rows] == ["25 MB (its own)", "1 MB"]


@pytest.mark.parametrize(
    ("num_ranks", "num_buckets", "dark"), [(2, 2, False), (16, 40, True), (20, 1, False)]
)
def test_ddp_is_drawn_for_any_number_of_ranks_and_buckets(num_ranks, num_buckets, dark):
    figures = inspection_of(num_ranks, num_buckets).figures(dark=dark)
    assert len(figures) == 3  # buckets, and a step with each of two sizes
    assert all(is_drawn(figure) and text for figure, text in figures)
    assert ("4 more ranks" in figures[1][1]) == (num_ranks == 20)
    shown = {text.get_text() for axes in figures[0][0].axes for text in axes.texts}
    assert ("and 35 more" in shown) == (num_buckets == 40)


def is_drawn(figure: Figure) -> bool:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    with Image.open(buffer) as image:
        return len(image.convert("RGB").getcolors(10_000_000)) > 20


# -- async ---------------------------------------------------------------------------------


def async_run(
    num_ranks: int, num_updates: int, *, skew: float = 0.0, strategy: str = "async", marks=()
) -> tuple[RunSnapshot, list[tuple[int, int, int]]]:
    """A run without a bound, and what was really (rank, read, written)."""
    chance = random.Random(0)
    free_at = dict.fromkeys(range(num_ranks), 0.0)
    ends = {rank: 0.01 * (1 + chance.random()) for rank in free_at}
    read, steps, truth = dict.fromkeys(range(num_ranks), 0), {n: [] for n in free_at}, []
    for version in range(num_updates):
        rank = min(ends, key=ends.__getitem__)
        truth.append((rank, read[rank], version + 1))
        seen = ends[rank] + skew * rank
        steps[rank].append(
            StepEvent(
                step=len(steps[rank]),
                seconds=seen,
                num_samples=8,
                loss=1.0,
                staleness=version - read[rank],
                parts=Parts(forward=0.005, backward=ends[rank] - free_at[rank] - 0.005),
            )
        )
        free_at[rank], read[rank] = ends[rank], version + 1
        ends[rank] += 0.01 * (1 + chance.random())
    run_spec = spec(strategy)
    run = run_of(run_spec, comparison="c")
    for rank, own in steps.items():
        first = replace(header(run_spec, num_updates), num_workers=num_ranks)
        run.add(
            batch(
                run_spec.run_id,
                own,
                rank=rank,
                header=None if rank else first,
                marks=() if rank else marks,
            )
        )
    run.end(Status.FINISHED)
    return run.snapshot(), truth


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_versions_follow_from_staleness_however_the_clocks_differ(num_ranks: int):
    run, truth = async_run(num_ranks, 200, skew=0.03)
    updates, num_guessed = updates_of(run, -1)
    assert [(each.rank, each.version_read, each.version_written) for each in updates] == truth
    assert num_guessed == 0


def comparison_of(run: RunSnapshot) -> Comparison:
    return Comparison(comparison_id="c", name="c", task="digits", runs=(run,))


@pytest.mark.parametrize(("num_ranks", "dark"), [(2, False), (20, True)])
def test_versions_are_drawn_with_a_death_and_for_many_workers(num_ranks: int, dark: bool):
    mark = Mark(rank=1, seconds=0.1, kind=MarkKind.KILLED)
    run, _ = async_run(num_ranks, 300, marks=(mark,))
    inspection = async_inspection(comparison_of(run))
    ((figure, text),) = inspection.figures(dark=dark)
    assert is_drawn(figure)
    assert "killed" in "".join(each.get_text() for each in figure.axes[0].texts)
    assert "staleness" in text
    assert "Rank 1 killed at 0.10 s." in inspection.words()
    assert any("4 more workers" in each.get_text() for each in figure.texts) == (num_ranks == 20)
    table = inspection.table()
    assert sum(int(row[1].text) for row in table.rows) == 300


def test_the_bound_is_a_wall():
    run, _ = async_run(2, 40, strategy="async:bound=3")
    inspection = async_inspection(comparison_of(run))
    assert inspection.bound == 3
    (figure, _), *_ = inspection.figures()
    assert any("bound 3" in each.get_text() for each in figure.axes[2].texts)
    moments, ahead = steps_ahead(inspection)
    assert len(moments) == 41
    assert all(min(values) == 0 for values in zip(*ahead, strict=True))


def test_only_async_has_versions():
    run, _ = async_run(2, 4, strategy="ddp")
    with pytest.raises(UserError, match="Versions are those of async, and c has ddp"):
        async_inspection(comparison_of(run))
