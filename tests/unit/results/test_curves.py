"""A run keeps all steps, and draws them as the right points if they arrive in any order."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from ddpnb.protocol.messages import Parts, RunReport, StepEvent, pack_step
from ddpnb.results.curve import MAX_POINTS, Curve, curve_of, end_of, smoothed
from ddpnb.results.rows import EVENT, Records, metrics_of
from ddpnb.results.run import Run, Status
from tests.unit.results.fake_runs import KeptRun, batch, ended_run, header, run_of, spec, step


def drawn(run: Run) -> Curve:
    return run.snapshot().curve


def rows(rank: int, *steps: StepEvent) -> Records:
    return np.frombuffer(b"".join(pack_step(rank, step) for step in steps), dtype=EVENT)


def test_synchronous_steps_are_a_weighted_mean_at_the_slowest_worker():
    run = run_of(spec("ddp"))
    run.add(batch(run.run_id, [step(0, 1.5, 8.0, 10), step(1, 1.9, 4.0, 30)], rank=1))
    assert len(drawn(run)) == 0, "the curve must wait for the header"
    head = header(spec("ddp"), 2)
    run.add(batch(run.run_id, [step(0, 1.0, 4.0, 30), step(1, 2.0, 2.0, 10)], header=head))
    curve = drawn(run)
    assert curve.mean.tolist() == [5.0, 3.5]
    assert curve.samples.tolist() == [40, 80]
    assert curve.seconds.tolist() == [1.5, 2.0]


def test_a_step_that_one_worker_has_not_reported_is_held_back_until_the_end():
    run = run_of(spec("ddp"))
    head = header(spec("ddp"), 2)
    run.add(batch(run.run_id, [step(0, 1.0), step(1, 2.0), step(4, 5.0)], header=head))
    assert len(drawn(run)) == 0
    run.add(batch(run.run_id, [step(0, 1.0)], rank=1))
    assert drawn(run).samples.tolist() == [20]
    run.add(batch(run.run_id, [step(4, 5.0)], rank=1, sequence=2))
    run.add(batch(run.run_id, [step(1, 2.0)], rank=1, sequence=1))
    run.end(Status.STOPPED)
    assert drawn(run).samples.tolist() == [20, 40, 60], "each late share must be in its place"
    replicas = run_of(spec("dp"))  # one process reports for both workers
    replicas.add(batch(replicas.run_id, [step(0, 1.0)], header=header(spec("dp"), 2)))
    assert drawn(replicas).samples.tolist() == [10]


def test_a_worker_without_samples_does_not_poison_the_mean():
    run = run_of(spec("ddp"))
    run.add(batch(run.run_id, [step(0, 1.0, 3.0, 10)], header=header(spec("ddp"), 1)))
    run.add(batch(run.run_id, [step(0, 1.0, math.nan, 0)], rank=1))
    assert drawn(run).mean.tolist() == [3.0]
    assert run.snapshot().num_diverged == 0
    unlogged = KeptRun(run_id="m", name="mine")
    unlogged.add(batch("m", [step(0, 1.0, math.nan)]))
    assert unlogged.snapshot().num_diverged == 0, "a loop without losses has not diverged"


@pytest.mark.parametrize("strategy", ["async", ""])
def test_asynchronous_steps_are_in_the_order_of_time(strategy: str):
    """Steps that a rank reports late are sorted by their time too."""
    run = run_of(spec(strategy)) if strategy else KeptRun(run_id="m", name="mine")
    head = header(spec("async"), 2) if strategy else None
    run.add(batch(run.run_id, [step(i, i + 1.0, 4.0 - i) for i in range(4)], header=head))
    assert drawn(run).samples.tolist() == [10, 20, 30, 40]
    run.add(batch(run.run_id, [step(i, i + 1.5, 3.5 - i) for i in range(4)], rank=1))
    assert drawn(run).mean.tolist() == [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5]
    assert drawn(run).seconds.tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert [rank.num_steps for rank in run.snapshot().ranks] == [4, 4]


@pytest.mark.parametrize("num", [1, 7, 360, 361, 2_345])
def test_neighbouring_updates_are_merged(num: int):
    losses = np.random.default_rng(num).normal(size=num)
    losses[::5] = np.nan
    every = rows(0, *(step(i, i + 1.0, loss) for i, loss in enumerate(losses)))
    curve = curve_of(every, None)
    parts = [losses[i : i + curve.num_merged] for i in range(0, num, curve.num_merged)]
    assert len(curve) == len(parts) <= MAX_POINTS
    assert (curve.samples[-1], curve.num_updates) == (num * 10, num)
    known = [part[np.isfinite(part)] for part in parts]
    means = [part.mean() if len(part) else np.nan for part in known]
    np.testing.assert_allclose(curve.mean, means)
    lowest = [part.min() if len(part) else np.nan for part in known]
    np.testing.assert_array_equal(curve.lowest, lowest)
    assert curve.num_bad.tolist() == [np.isnan(part).sum() for part in parts]


def waited(*communication: float, optimizer: tuple[float, ...] = (0.0, 0.0), **parts: float):
    """Return each rank's waiting and communication in a step that all ranks end together."""
    steps = [
        replace(step(0, 10.0), parts=Parts(communication=each, optimizer=own, **parts))
        for each, own in zip(communication, optimizer, strict=True)
    ]
    ranks = ended_run("ddp", *([each] for each in steps)).snapshot().ranks
    return [(round(rank.parts.waiting, 6), round(rank.parts.communication, 6)) for rank in ranks]


def test_who_communicates_longer_than_the_last_to_come_has_waited_for_it():
    assert waited(4.0, 1.0) == [(3.0, 1.0), (0.0, 1.0)]
    assert waited(4.0, 0.0) == [(4.0, 0.0), (0.0, 0.0)], "rank 1 hid all communication"
    assert waited(4.0, 1.0, waiting=0.25) == [(0.25, 4.0), (0.25, 1.0)], "measured waiting stays"
    # local-sgd updates before it communicates
    assert waited(0.6, 0.1, optimizer=(0.0, 0.5)) == [(0.5, 0.1), (0.0, 0.1)]


def falling(num_planned: int, num_done: int, nan_at: int = -1) -> Curve:
    """Return the curve of a loss that falls to a tenth in 20 updates and then stays."""
    losses = [math.nan if i == nan_at else 0.1 + 2.4 * math.exp(-i / 8) for i in range(num_done)]
    steps = [step(i, i + 1.0, loss, 256) for i, loss in enumerate(losses)]
    return curve_of(rows(0, *steps), header(spec("single"), num_planned))


@pytest.mark.parametrize("num_done", [40, 300, 2000])
def test_the_smoothed_line_goes_through_its_points_and_stays_whatever_is_planned(num_done: int):
    curve = falling(10_000, num_done)
    ratio = smoothed(curve) / curve.mean
    assert 0.99 < ratio.min() <= ratio.max() < 1.4
    if num_done <= MAX_POINTS:
        np.testing.assert_allclose(smoothed(falling(40, 40)), smoothed(curve)[:40])
    assert np.flatnonzero(np.isnan(smoothed(falling(40, 40, nan_at=20)))).tolist() == [20]


def test_steps_are_kept_as_rows_and_a_snapshot_does_not_change():
    run = run_of(spec("ddp"))
    run.add(batch(run.run_id, [step(3, 1.5, 0.25, 7, 2)], rank=1, header=header(spec("ddp"), 1)))
    before = run.snapshot()
    (row,) = before.events
    ranks = before.ranks
    assert (row["step"], row["seconds"], row["loss"]) == (3, 1.5, 0.25)
    assert (row["num_samples"], row["staleness"], row["rank"]) == (7, 2, 1)
    run.add(batch(run.run_id, [step(i, 1.0) for i in range(5000)], sequence=1))
    run.end(Status.FAILED, "rank 1 was killed")
    after = run.snapshot()
    assert (len(ranks), len(after.events)) == (1, 5001)
    assert (before.num_events, after.num_events) == (1, 5001)
    assert (before.status, after.status, after.detail) == ("running", "failed", "rank 1 was killed")


@pytest.mark.parametrize("seed", range(5))
def test_the_end_of_each_logged_number_is_that_of_its_stored_rows(seed: int):
    draw, run = random.Random(seed), KeptRun(run_id="m", name="mine")
    for sequence in range(20):
        names = draw.sample(["norm", "rate", "seen"], draw.randint(0, 3))
        pairs = [(i, name) for name in names for i in range(4) if draw.random() > 0.3]
        logged = [(*pair, draw.gauss(3)) for pair in pairs]
        steps = [step(4 * sequence + i, 4.0 * sequence + i) for i in range(4)]
        run.add(batch("m", steps, rank=draw.randint(0, 2), sequence=sequence, metrics=logged))
    run.end(Status.FINISHED)
    found = run.snapshot()
    values = {name: found.events[field] for name, field in metrics_of(found.events).items()}
    ends = {name: end_of(curve_of(found.events, None, each)) for name, each in values.items()}
    assert found.last == pytest.approx(ends)
    assert len(ends) == 3


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
    run = KeptRun(run_id="m", name="mine")
    for sequence, num in enumerate((1000, 2, 10)):
        run.add(batch("m", [step(i, i + 1.0) for i in range(num)], sequence=sequence))
        assert run.snapshot().num_events == (1000, 1000, 1012)[sequence]
    run.add(batch("m", [step(0, 1.0)], sequence=3))
    run.end(Status.STOPPED)
    assert run.snapshot().num_events == 1013
