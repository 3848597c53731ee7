"""What does a run hold of what has arrived, and what is known of its ranks?"""

import math

import numpy as np
import pytest

from ddpnb.history.curve import MAX_POINTS
from ddpnb.history.model import Run, Status, absences, slowness, step_split
from ddpnb.history.rows import metrics_of
from ddpnb.protocol.messages import Mark, MarkKind, RunReport
from tests.unit.history.fake_runs import batch, fake_run, header, run_of, spec, step


def a_run() -> Run:
    return run_of(spec("ddp"), comparison="digits-1", created=5.0)


def test_steps_are_kept_as_rows_and_a_snapshot_does_not_change():
    run = a_run()
    run.add(batch(run.run_id, [step(3, 1.5, 0.25, 7, 2)], rank=1, header=header(spec("ddp"), 1)))
    before = run.snapshot()
    assert (before.name, before.status, before.is_running) == ("ddp", "running", True)
    (row,) = before.events
    assert (row["step"], row["seconds"], row["loss"]) == (3, 1.5, 0.25)
    assert (row["num_samples"], row["staleness"], row["rank"]) == (7, 2, 1)
    run.add(batch(run.run_id, [step(i, 1.0) for i in range(5000)], sequence=1))
    run.end(Status.FAILED, "rank 1 was killed")
    after = run.snapshot()
    assert (len(before.events), len(after.events)) == (1, 5001)
    assert not before.events.flags.writeable
    assert (after.status, after.detail) == ("failed", "rank 1 was killed")


def test_what_followed_a_last_step_is_a_part_of_it():
    run = a_run()
    head = header(spec("ddp"), 1)
    for rank in range(2):
        steps = [step(0, 1.0), step(1, 2.0)]
        run.add(batch(run.run_id, steps, rank=rank, header=head))
        run.add_report(
            RunReport(run_id=run.run_id, rank=rank, took_part=True, seconds=2.5 + rank / 4)
        )
    run.end(Status.FINISHED)
    snapshot = run.snapshot()
    assert snapshot.events["seconds"].tolist() == [1.0, 2.5, 1.0, 2.75]
    assert snapshot.seconds == snapshot.curve.seconds[-1] == 2.75
    assert [rank.seconds for rank in snapshot.ranks] == [2.5, 2.75]


def test_a_gap_is_seen_and_mended_by_a_late_batch():
    run = a_run()
    run.add(batch(run.run_id, [step(0, 1.0)], sequence=0))
    run.add(batch(run.run_id, [step(3, 1.0)], sequence=3))
    assert run.snapshot().num_lost_batches == 2
    run.add(batch(run.run_id, [step(1, 1.0)], sequence=1))
    assert run.snapshot().num_lost_batches == 1
    run.add_report(RunReport(run_id=run.run_id, rank=0, took_part=True, num_batches_sent=6))
    assert (run.snapshot().num_lost_batches, len(run.snapshot().events)) == (3, 3)


def test_a_metric_stands_in_the_row_of_its_step():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(0, 0.5)]))
    run.add(batch("m", [step(1, 1.0)], sequence=1, metrics=[(0, "grad", 2.5), (0, "lr", 0.1)]))
    events = run.snapshot().events
    fields = metrics_of(events)
    assert list(fields) == ["grad", "lr"]
    np.testing.assert_array_equal(events[fields["grad"]], [np.nan, 2.5])


def test_steps_of_a_long_run_leave_memory_and_are_read_when_asked_for():
    whole = Run(run_id="m", name="mine")
    read: list[None] = []
    run = Run(run_id="m", name="mine", stored=lambda: read.append(None) or whole.snapshot().events)
    sizes = []
    for sequence in range(30):
        steps = [step(i, i + 1.0) for i in range(1000 * sequence, 1000 * (sequence + 1))]
        for each in (whole, run):
            each.add(batch("m", steps, sequence=sequence))
        sizes.append(run.snapshot().curve.mean.nbytes)
    for _ in range(2):
        snapshot = run.snapshot()
        assert max(sizes) <= 8 * MAX_POINTS
        assert (snapshot.num_events, snapshot.num_samples) == (30_000, 300_000)
        assert np.array_equal(snapshot.events["step"], np.arange(30_000))
        run.end(Status.FINISHED)
    assert len(read) == 3, "twice by the test, and when it ended"


def test_the_mean_step_adds_up_and_hidden_time_is_not_in_it():
    run = fake_run("ddp", num_steps=50).snapshot()
    split = step_split([run, run])
    assert split.seconds == pytest.approx(float(run.events["seconds"].max()) / 50, rel=0.05)
    assert split.parts.hidden > 0
    assert split.exposed_share == pytest.approx(0.24, abs=0.01)
    assert split.num_bytes_sent == 49_380
    unknown = step_split([Run(run_id="m", name="mine").snapshot()])
    assert not unknown.is_known
    assert math.isnan(unknown.exposed_share)


def test_a_slow_rank_makes_the_other_wait():
    run = fake_run("ddp", num_steps=50, slow_rank=1).snapshot()
    first, second = run.ranks
    assert first.parts.waiting > 10 * second.parts.waiting
    times = slowness(run.ranks)
    assert times[0] == 1.0
    assert times[1] > 1.15
    assert slowness([]) == {}


@pytest.mark.parametrize("marked_at", [7.0, 7.5])
def test_a_rank_that_died_is_away_from_its_last_step_until_its_next(marked_at: float):
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0) for i in range(9)]))
    marks = [
        Mark(rank=1, seconds=at, kind=kind)
        for at, kind in ((3.4, MarkKind.KILLED), (marked_at, MarkKind.CAME_BACK))
    ]
    run.add(
        batch("m", [step(i, at) for i, at in enumerate((1.0, 3.0, 7.0, 8.0))], rank=1, marks=marks)
    )
    run.end(Status.FINISHED)
    assert absences(run.snapshot()) == {1: [(3.0, 7.0)]}
    run.add(batch("m", [], sequence=1, marks=[Mark(rank=0, seconds=9.5, kind=MarkKind.DIED)]))
    assert absences(run.snapshot()) == {1: [(3.0, 7.0)], 0: [(9.0, math.inf)]}
