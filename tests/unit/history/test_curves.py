import math

import numpy as np
import pytest

from ddpnb.history.aggregate import MAX_POINTS, Curve
from ddpnb.history.metrics import (
    first_reached,
    num_diverged,
    smooth,
    smoothed_loss,
    tenths,
    throughput,
    window_for,
)
from ddpnb.history.model import Run, Status
from tests.unit.history.fake_runs import batch, fake_run, header, run_of, spec, step


def a_run(strategy: str) -> Run:
    return run_of(spec(strategy), comparison="digits-1", created=1.0)


def curve_of(run: Run) -> Curve:
    return run.snapshot().aggregate.curve


def even_curve(num: int, samples: float = 10.0, seconds: float = 0.5) -> Curve:
    at = np.arange(1, num + 1)
    return Curve(samples=at * samples, seconds=at * seconds, loss=np.ones(num), num_updates=num)


def test_synchronous_steps_are_a_weighted_mean_at_the_slowest_worker():
    run = a_run("ddp")
    head = header(spec("ddp"), 2)
    run.add(batch(run.run_id, [step(0, 1.0, 4.0, 30), step(1, 2.0, 2.0, 10)], header=head))
    run.add(batch(run.run_id, [step(0, 1.5, 8.0, 10), step(1, 1.9, 4.0, 30)], rank=1))
    steps = curve_of(run)
    assert steps.loss.tolist() == [5.0, 3.5]
    assert steps.samples.tolist() == [40, 80]
    assert steps.seconds.tolist() == [1.5, 2.0]


def test_a_step_that_one_worker_has_not_reported_is_held_back_until_the_end():
    run = a_run("ddp")
    head = header(spec("ddp"), 2)
    run.add(batch(run.run_id, [step(0, 1.0), step(1, 2.0)], header=head))
    assert len(curve_of(run)) == 0
    run.add(batch(run.run_id, [step(0, 1.0)], rank=1))
    assert curve_of(run).samples.tolist() == [20]
    run.end(Status.STOPPED)
    assert curve_of(run).samples.tolist() == [20, 30]


def test_one_process_with_two_replicas_is_not_waited_for_twice():
    run = a_run("dp")
    run.add(batch(run.run_id, [step(0, 1.0, samples=256)], header=header(spec("dp"), 2)))
    assert curve_of(run).samples.tolist() == [256]


def test_a_worker_without_samples_does_not_poison_the_mean():
    run = a_run("ddp")
    run.add(batch(run.run_id, [step(0, 1.0, 3.0, 10)], header=header(spec("ddp"), 1)))
    run.add(batch(run.run_id, [step(0, 1.0, math.nan, 0)], rank=1))
    assert curve_of(run).loss.tolist() == [3.0]
    assert num_diverged(run.snapshot()) == 0


def test_asynchronous_steps_are_ordered_by_time_as_far_as_all_have_reported():
    run = a_run("async")
    head = header(spec("async"), 2)
    run.add(batch(run.run_id, [step(0, 1.0, 4.0), step(1, 3.0, 2.0)], header=head))
    assert len(curve_of(run)) == 0
    run.add(batch(run.run_id, [step(0, 2.0, 3.0, 20)], rank=1))
    assert curve_of(run).loss.tolist() == [4.0, 3.0]
    run.end(Status.FINISHED)
    assert curve_of(run).loss.tolist() == [4.0, 3.0, 2.0]
    assert curve_of(run).samples.tolist() == [10, 30, 40]


def test_hand_written_steps_of_several_ranks_are_ordered_by_time():
    run = Run(run_id="m", name="mine", num_ranks=2)
    run.add(batch("m", [step(0, 1.0, 4.0), step(1, 3.0, 2.0)]))
    assert len(curve_of(run)) == 0
    run.add(batch("m", [step(0, 0.9, 5.0), step(1, 2.0, 3.0)], rank=1))
    assert curve_of(run).loss.tolist() == [5.0, 4.0, 3.0]
    run.end(Status.FINISHED)
    assert curve_of(run).loss.tolist() == [5.0, 4.0, 3.0, 2.0]


def test_a_rank_that_never_logs_is_not_waited_for_in_the_end():
    run = Run(run_id="m", name="mine", num_ranks=2)
    run.add(batch("m", [step(0, 1.0, 4.0), step(1, 3.0, 2.0)]))
    run.end(Status.FINISHED)
    assert curve_of(run).loss.tolist() == [4.0, 2.0]


def test_what_was_reported_too_late_has_its_place_in_the_end():
    run = Run(run_id="m", name="mine")  # two ranks log, although one is known of
    run.add(batch("m", [step(i, i + 1.0, 4.0 - i) for i in range(4)]))
    run.add(batch("m", [step(i, i + 1.5, 3.5 - i) for i in range(4)], rank=1))
    assert curve_of(run).seconds.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    run.end(Status.FINISHED)
    assert curve_of(run).loss.tolist() == [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5]
    assert curve_of(run).seconds.tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    aggregate = run.snapshot().aggregate
    assert (aggregate.num_events, [rank.num_steps for rank in aggregate.ranks]) == (8, [4, 4])


def test_an_empty_run_has_empty_curves():
    curve = curve_of(a_run("ddp"))
    assert len(curve) == len(tenths(curve)) == 0
    assert throughput(curve, 1.0)[0].tolist() == []


def test_events_before_the_header_wait_for_it():
    run = a_run("ddp")
    run.add(batch(run.run_id, [step(0, 1.5, 8.0)], rank=1))
    assert len(curve_of(run)) == 0
    run.add(batch(run.run_id, [step(0, 1.0, 4.0)], header=header(spec("ddp"), 1)))
    assert curve_of(run).loss.tolist() == [6.0]


@pytest.mark.parametrize("num", [1, 499, 500, 501, 7_777])
def test_no_curve_is_longer_than_it_may_be(num: int):
    run = Run(run_id="m", name="mine")
    for sequence, at in enumerate(range(0, num, 97)):
        events = [step(i, i + 1.0) for i in range(at, min(at + 97, num))]
        run.add(batch("m", events, sequence=sequence))
    curve = curve_of(run)
    assert 0 < len(curve) <= MAX_POINTS
    assert (curve.samples[-1], curve.num_updates, curve.updates[-1]) == (num * 10, num, num)


def test_the_first_time_a_loss_is_reached_is_between_the_points():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert first_reached(np.array([4.0, 3.0, math.nan, 1.0]), x, 2.0) == 3.0
    assert first_reached(np.array([1.0, 2.0, 3.0, 4.0]), x, 2.0) == 1.0
    assert math.isnan(first_reached(np.array([4.0, 3.0, math.inf, 2.5]), x, 2.0))


def test_smoothing_has_no_start_up_bias_and_passes_over_nan():
    spans = np.full(4, 10 / math.log(2))  # so that ten samples weigh one half
    smoothed = smooth(np.array([4.0, 1.0, math.nan, 1.0]), np.array([10.0, 20, 30, 40]), spans)
    # (4/4 + 1/2) / (3/4) = 2; then (0.75 * 2 / 2 + 1/2) / (7/8)
    np.testing.assert_allclose(smoothed, [4.0, 2.0, math.nan, 1.25 / 0.875])


def test_a_constant_stays_constant_when_smoothed():
    at = np.arange(1.0, 50.0)
    np.testing.assert_allclose(smooth(np.full(49, 3.0), at, np.full(49, 7.0)), 3.0)


def falling(num_planned: int, num_done: int) -> Run:
    """A run whose loss falls to a tenth in 20 updates, and then stays."""
    run = a_run("single")
    events = [step(i, i + 1.0, 0.1 + 2.4 * math.exp(-i / 8), 256) for i in range(num_done)]
    run.add(batch(run.run_id, events, header=header(spec("single"), num_planned)))
    return run


@pytest.mark.parametrize("num_done", [40, 300, 2000])
def test_the_smoothed_line_goes_through_its_points_also_of_a_run_that_is_planned_long(
    num_done: int,
):
    run = falling(10_000, num_done).snapshot()
    ratio = smoothed_loss(run) / run.aggregate.curve.loss
    assert 0.99 < ratio.min() <= ratio.max() < 1.4


def test_the_smoothed_line_stays_whatever_is_planned_and_whatever_comes():
    short, long = falling(40, 40).snapshot(), falling(10_000, 300).snapshot()
    np.testing.assert_allclose(smoothed_loss(short), smoothed_loss(long)[:40])


def test_late_in_a_run_noise_is_averaged():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(i, i + 1.0, 1.0 + 0.5 * (-1) ** i, samples=0) for i in range(300)]))
    assert np.abs(smoothed_loss(run.snapshot())[200:] - 1.0).max() < 0.05


def test_throughput_of_even_steps_is_even():
    at, rate = throughput(even_curve(20), window=2.0)
    assert at[0] == 2.0
    assert at[-1] == 10.0
    np.testing.assert_allclose(rate, 20.0)


def test_throughput_shows_a_pause():
    curve = Curve(
        samples=np.array([10.0, 20, 30]),
        seconds=np.array([1.0, 6, 7]),
        loss=np.ones(3),
        num_updates=3,
    )
    at, rate = throughput(curve, window=1.0, max_points=7)
    np.testing.assert_allclose(np.interp([1.0, 3.0, 7.0], at, rate), [10, 2, 10])


@pytest.mark.parametrize(("seconds", "window"), [(12, 1.0), (23, 1.0), (24, 2.0), (0.6, 0.05)])
def test_windows_are_round(seconds: float, window: float):
    assert window_for(seconds) == pytest.approx(window)


def test_tenths_of_a_run_that_slows_down():
    curve = Curve(
        samples=np.arange(1.0, 11.0),
        seconds=np.array([1, 2, 3, 4, 5, 7, 9, 11, 13, 15.0]),
        loss=np.ones(10),
        num_updates=10,
    )
    np.testing.assert_allclose(tenths(curve), [1.0] * 5 + [0.5] * 5)
    assert len(tenths(even_curve(9))) == 0


def test_diverged_losses_are_counted_and_kept():
    run = fake_run("single", num_steps=20, nan_from=15).snapshot()
    assert num_diverged(run) == 5
    curve = run.aggregate.curve
    assert np.isnan(curve.loss).sum() == curve.num_bad.sum() == 5


def test_a_loop_that_never_logs_a_loss_did_not_diverge():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(0, 1.0, math.nan)]))
    assert num_diverged(run.snapshot()) == 0
