"""What does a run hold of what has arrived, and what is known of its ranks?"""

from ddpnb.history.model import Run, Status
from ddpnb.protocol.messages import RunReport
from tests.unit.history.fake_runs import batch, header, run_of, spec, step


def test_steps_are_kept_as_rows_and_a_snapshot_does_not_change():
    run = run_of(spec("ddp"))
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
    run = run_of(spec("ddp"))
    for rank, end in enumerate((2.5, 2.75)):
        steps = [step(0, 1.0), step(1, 2.0)]
        run.add(batch(run.run_id, steps, rank=rank, header=header(spec("ddp"), 1)))
        run.add_report(RunReport(run_id=run.run_id, rank=rank, seconds=end))
    run.end(Status.FINISHED)
    snapshot = run.snapshot()
    assert snapshot.events["seconds"].tolist() == [1.0, 2.5, 1.0, 2.75]
    assert snapshot.seconds == snapshot.curve.seconds[-1] == 2.75
    assert [rank.seconds for rank in snapshot.ranks] == [2.5, 2.75]


def test_a_long_run_is_measured_anew_once_it_has_grown_and_when_it_ends():
    run = Run(run_id="m", name="mine")
    for sequence, num in enumerate((1000, 2, 10)):
        run.add(batch("m", [step(i, i + 1.0) for i in range(num)], sequence=sequence))
        assert run.snapshot().num_events == (1000, 1000, 1012)[sequence]
    run.add(batch("m", [step(0, 1.0)], sequence=3))
    run.end(Status.STOPPED)
    assert run.snapshot().num_events == 1013
