"""What does a run hold of what has arrived, and what is known of its ranks?"""

import math

import numpy as np
import pytest

from ddpnb.history.model import Run, Status, slowness, step_split
from ddpnb.history.rows import metrics_of
from ddpnb.protocol.messages import RunReport
from tests.unit.history.fake_runs import batch, fake_run, header, run_of, spec, step


def a_run() -> Run:
    return run_of(spec("ddp"), comparison="digits-1", created=5.0)


def test_steps_are_kept_as_rows_and_a_snapshot_does_not_change():
    run = a_run()
    run.add(batch(run.run_id, [step(3, 1.5, 0.25, 7, 2)], rank=1, header=header(spec("ddp"), 1)))
    before = run.snapshot()
    (row,) = before.events
    assert (row["step"], row["seconds"], row["loss"]) == (3, 1.5, 0.25)
    assert (row["num_samples"], row["staleness"], row["rank"]) == (7, 2, 1)
    run.add(batch(run.run_id, [step(i, 1.0) for i in range(5000)], sequence=1))
    run.end(Status.FAILED, "rank 1 was killed")
    after = run.snapshot()
    assert (len(before.events), len(after.events)) == (1, 5001)
    assert not before.events.flags.writeable
    assert (before.status, after.status, after.detail) == ("running", "failed", "rank 1 was killed")


def test_what_followed_a_last_step_is_a_part_of_it():
    run = a_run()
    for rank, end in enumerate((2.5, 2.75)):
        steps = [step(0, 1.0), step(1, 2.0)]
        run.add(batch(run.run_id, steps, rank=rank, header=header(spec("ddp"), 1)))
        run.add_report(RunReport(run_id=run.run_id, rank=rank, took_part=True, seconds=end))
    run.end(Status.FINISHED)
    snapshot = run.snapshot()
    assert snapshot.events["seconds"].tolist() == [1.0, 2.5, 1.0, 2.75]
    assert snapshot.seconds == snapshot.curve.seconds[-1] == 2.75
    assert [rank.seconds for rank in snapshot.ranks] == [2.5, 2.75]


def test_a_metric_stands_in_the_row_of_its_step():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(0, 0.5)]))
    run.add(batch("m", [step(1, 1.0)], sequence=1, metrics=[(0, "grad", 2.5), (0, "lr", 0.1)]))
    events = run.snapshot().events
    fields = metrics_of(events)
    assert list(fields) == ["grad", "lr"]
    np.testing.assert_array_equal(events[fields["grad"]], [np.nan, 2.5])


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


def test_a_long_run_is_measured_anew_once_it_has_grown_and_when_it_ends():
    run = Run(run_id="m", name="mine")
    for sequence, num in enumerate((1000, 2, 10)):
        run.add(batch("m", [step(i, i + 1.0) for i in range(num)], sequence=sequence))
        assert run.snapshot().num_events == (1000, 1000, 1012)[sequence]
    run.add(batch("m", [step(0, 1.0)], sequence=3))
    run.end(Status.STOPPED)
    assert run.snapshot().num_events == 1013
