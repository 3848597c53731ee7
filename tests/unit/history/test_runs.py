import numpy as np

from ddpnb.history.aggregate import MAX_POINTS
from ddpnb.history.model import Run, Status
from ddpnb.protocol.messages import RunReport
from tests.unit.history.fake_runs import batch, header, run_of, spec, step


def a_run() -> Run:
    return run_of(spec("ddp"), comparison="digits-1", created=5.0)


def test_a_run_starts_empty_and_running():
    snapshot = a_run().snapshot()
    assert (snapshot.name, snapshot.status, len(snapshot.events)) == ("ddp", "running", 0)
    assert snapshot.header is None


def test_events_are_kept_in_columns():
    run = a_run()
    run.add(batch(run.run_id, [step(3, 1.5, 0.25, 7, 2)], rank=1, header=header(spec("ddp"), 1)))
    (row,) = run.snapshot().events
    assert (row["step"], row["seconds"], row["loss"]) == (3, 1.5, 0.25)
    assert (row["num_samples"], row["staleness"], row["rank"]) == (7, 2, 1)


def test_a_snapshot_does_not_change_and_cannot_be_written():
    run = a_run()
    run.add(batch(run.run_id, [step(0, 1.0)]))
    before = run.snapshot()
    run.add(batch(run.run_id, [step(i, 1.0) for i in range(5000)], sequence=1))
    assert len(before.events) == 1
    assert len(run.snapshot().events) == 5001
    assert not before.events.flags.writeable


def test_a_batch_that_comes_twice_counts_once():
    run = a_run()
    assert run.add(batch(run.run_id, [step(0, 1.0)]))
    assert not run.add(batch(run.run_id, [step(0, 1.0)]))
    assert run.add(batch(run.run_id, [step(0, 1.0)], rank=1))
    assert len(run.snapshot().events) == 2


def test_a_gap_is_seen_and_mended_by_a_late_batch():
    run = a_run()
    run.add(batch(run.run_id, [step(0, 1.0)], sequence=0))
    run.add(batch(run.run_id, [step(3, 1.0)], sequence=3))
    assert run.snapshot().num_lost_batches == 2
    assert run.add(batch(run.run_id, [step(1, 1.0)], sequence=1))
    assert run.snapshot().num_lost_batches == 1


def test_a_report_counts_batches_lost_at_the_end():
    run = a_run()
    run.add(batch(run.run_id, [step(0, 1.0)], sequence=0))
    run.add_report(RunReport(run_id=run.run_id, rank=0, took_part=True, num_batches_sent=3))
    assert run.snapshot().num_lost_batches == 2


def test_metrics_point_at_their_events():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(0, 0.5)]))
    run.add(batch("m", [step(1, 1.0)], sequence=1, metrics=[(0, "grad", 2.5), (0, "lr", 0.1)]))
    metrics = run.snapshot().metrics
    assert metrics["grad"].tolist() == [(1, 2.5)]
    assert metrics["lr"].tolist() == [(1, 0.1)]


def test_a_snapshot_has_the_end():
    run = a_run()
    run.end(Status.FAILED, "rank 1 was killed")
    snapshot = run.snapshot()
    assert (snapshot.status, snapshot.detail, snapshot.is_running) == (
        "failed",
        "rank 1 was killed",
        False,
    )


def test_many_small_batches_stay_in_order():
    run = a_run()
    for sequence in range(1000):
        run.add(batch(run.run_id, [step(sequence, 1.0)], sequence=sequence))
    assert np.array_equal(run.snapshot().events["step"], np.arange(1000))


def test_events_of_a_long_run_leave_memory_and_are_read_when_asked_for():
    whole = Run(run_id="m", name="mine")
    run = Run(run_id="m", name="mine", load=whole.snapshot)
    for sequence in range(30):
        events = [step(i, i + 1.0) for i in range(1000 * sequence, 1000 * (sequence + 1))]
        for each in (whole, run):
            each.add(batch("m", events, sequence=sequence))
    snapshot = run.snapshot()
    assert snapshot.row_parts is None
    assert snapshot.aggregate.num_events == 30_000
    assert snapshot.aggregate.num_samples == 300_000
    assert np.array_equal(snapshot.events["step"], np.arange(30_000))


def test_a_snapshot_holds_as_much_at_any_length():
    run = Run(run_id="m", name="mine", load=lambda: run.snapshot())
    sizes = []
    for sequence in range(40):
        events = [step(i, i + 1.0) for i in range(5000 * sequence, 5000 * (sequence + 1))]
        run.add(batch("m", events, sequence=sequence))
        curve = run.snapshot().aggregate.curve
        sizes.append(curve.loss.nbytes + curve.samples.nbytes + curve.seconds.nbytes)
    assert max(sizes) <= 3 * 8 * MAX_POINTS


def test_staleness_is_counted():
    run = a_run()
    events = [step(i, i + 1.0, staleness=stale) for i, stale in enumerate((0, 2, 2, 5000))]
    run.add(batch(run.run_id, events))
    counts = run.snapshot().aggregate.staleness
    assert (counts[0], counts[2], counts[-1], counts.sum()) == (1, 2, 1, 4)


def test_a_metric_has_a_curve_as_the_loss_has():
    run = run_of(spec("ddp"))
    name = run.run_id
    run.add(batch(name, [step(0, 0.5)], header=header(spec("ddp"), 2)))
    run.add(batch(name, [step(0, 0.6)], rank=1))
    for rank, value in enumerate((1.0, 4.0)):  # the second worker has twice as many samples
        steps = [step(1, 1.0, samples=10 * (rank + 1))]
        metrics = [(0, "f1", value)]
        run.add(batch(name, steps, rank=rank, sequence=1, metrics=metrics))
    run.end(Status.FINISHED)
    curve, loss = run.snapshot().metric_curves["f1"], run.snapshot().aggregate.curve
    assert curve.samples.tolist() == loss.samples.tolist() == [20, 50]
    np.testing.assert_allclose(curve.loss, [np.nan, 3.0])
