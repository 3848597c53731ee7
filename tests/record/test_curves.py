import math

import numpy as np
import pytest

from ddpnb.notebook.record.curves import (
    Steps,
    num_diverged,
    smooth,
    steps_of,
    tenths,
    thin,
    throughput,
    window_for,
)
from ddpnb.notebook.record.runs import Run, Status
from tests.record.fake_runs import batch, fake_run, header, spec, step


def a_run(strategy: str) -> Run:
    return Run.of_spec(spec(strategy), comparison="digits-1", created=1.0)


def even_steps(num: int, samples: float = 10.0, seconds: float = 0.5) -> Steps:
    at = np.arange(1, num + 1)
    return Steps(
        samples=at * samples,
        seconds=at * seconds,
        loss=np.ones(num),
        weight=np.full(num, samples),
    )


def test_synchronous_steps_are_a_weighted_mean_at_the_slowest_worker():
    run = a_run("ddp")
    head = header(spec("ddp"), 2)
    run.add(batch(run.run_id, [step(0, 1.0, 4.0, 30), step(1, 2.0, 2.0, 10)], header=head))
    run.add(batch(run.run_id, [step(0, 1.5, 8.0, 10), step(1, 1.9, 4.0, 30)], rank=1))
    steps = steps_of(run.snapshot())
    assert steps.loss.tolist() == [5.0, 3.5]
    assert steps.samples.tolist() == [40, 80]
    assert steps.seconds.tolist() == [1.5, 2.0]


def test_a_step_that_one_worker_has_not_told_is_held_back_until_the_end():
    run = a_run("ddp")
    head = header(spec("ddp"), 2)
    run.add(batch(run.run_id, [step(0, 1.0), step(1, 2.0)], header=head))
    assert len(steps_of(run.snapshot())) == 0
    run.add(batch(run.run_id, [step(0, 1.0)], rank=1))
    assert steps_of(run.snapshot()).samples.tolist() == [20]
    run.end(Status.STOPPED)
    assert steps_of(run.snapshot()).samples.tolist() == [20, 30]


def test_one_process_with_two_replicas_is_not_waited_for_twice():
    run = a_run("dp")
    run.add(batch(run.run_id, [step(0, 1.0, samples=256)], header=header(spec("dp"), 2)))
    assert steps_of(run.snapshot()).samples.tolist() == [256]


def test_a_worker_without_samples_does_not_poison_the_mean():
    run = a_run("ddp")
    run.add(batch(run.run_id, [step(0, 1.0, 3.0, 10)], header=header(spec("ddp"), 1)))
    run.add(batch(run.run_id, [step(0, 1.0, math.nan, 0)], rank=1))
    assert steps_of(run.snapshot()).loss.tolist() == [3.0]


def test_asynchronous_steps_are_ordered_by_time():
    run = a_run("async")
    head = header(spec("async"), 2)
    run.add(batch(run.run_id, [step(0, 1.0, 4.0), step(1, 3.0, 2.0)], header=head))
    run.add(batch(run.run_id, [step(0, 2.0, 3.0, 20)], rank=1))
    steps = steps_of(run.snapshot())
    assert steps.loss.tolist() == [4.0, 3.0, 2.0]
    assert steps.samples.tolist() == [10, 30, 40]


def test_an_empty_run_has_empty_curves():
    steps = steps_of(a_run("ddp").snapshot())
    assert len(steps) == len(thin(steps)) == len(tenths(steps)) == 0
    assert throughput(steps, 1.0)[0].tolist() == []


def test_thinning_merges_powers_of_two_and_keeps_extremes():
    steps = Steps(
        samples=np.arange(1.0, 11.0),
        seconds=np.arange(1.0, 11.0),
        loss=np.array([1, 3, 5, 7, math.nan, math.inf, 2, math.nan, 4, 6.0]),
        weight=np.ones(10),
    )
    curve = thin(steps, 5)
    assert curve.num_merged == 2
    assert curve.samples.tolist() == [2, 4, 6, 8, 10]
    np.testing.assert_equal(curve.loss, [2, 6, math.nan, 2, 5])
    np.testing.assert_equal(curve.lowest, [1, 5, math.nan, 2, 4])
    np.testing.assert_equal(curve.highest, [3, 7, math.nan, 2, 6])


def test_thinned_points_stay_while_the_run_grows():
    short, long = thin(even_steps(900), 500), thin(even_steps(990), 500)
    assert short.num_merged == long.num_merged == 2
    assert long.samples[: len(short)].tolist() == short.samples.tolist()


@pytest.mark.parametrize("num", [1, 499, 500, 501, 7_777])
def test_no_curve_is_longer_than_asked(num: int):
    curve = thin(even_steps(num), 500)
    assert 0 < len(curve) <= 500
    assert curve.samples[-1] == num * 10


def test_smoothing_has_no_start_up_bias_and_passes_over_nan():
    span = 10 / math.log(2)  # so that ten samples weigh one half
    smoothed = smooth(np.array([4.0, 1.0, math.nan, 1.0]), np.array([10.0, 20, 30, 40]), span)
    # (4/4 + 1/2) / (3/4) = 2; then (0.75 * 2 / 2 + 1/2) / (7/8)
    np.testing.assert_allclose(smoothed, [4.0, 2.0, math.nan, 1.25 / 0.875])


def test_a_constant_stays_constant_when_smoothed():
    at = np.arange(1.0, 50.0)
    np.testing.assert_allclose(smooth(np.full(49, 3.0), at, 7.0), 3.0)


def test_throughput_of_even_steps_is_even():
    at, rate = throughput(even_steps(20), window=2.0)
    assert at[0] == 2.0
    assert at[-1] == 10.0
    np.testing.assert_allclose(rate, 20.0)


def test_throughput_shows_a_pause():
    steps = Steps(
        samples=np.array([10.0, 20, 30]),
        seconds=np.array([1.0, 6, 7]),
        loss=np.ones(3),
        weight=np.full(3, 10.0),
    )
    at, rate = throughput(steps, window=1.0, max_points=7)
    np.testing.assert_allclose(np.interp([1.0, 3.0, 7.0], at, rate), [10, 2, 10])


@pytest.mark.parametrize(("seconds", "window"), [(12, 1.0), (23, 1.0), (24, 2.0), (0.6, 0.05)])
def test_windows_are_round(seconds: float, window: float):
    assert window_for(seconds) == pytest.approx(window)


def test_tenths_of_a_run_that_slows_down():
    steps = Steps(
        samples=np.arange(1.0, 11.0),
        seconds=np.array([1, 2, 3, 4, 5, 7, 9, 11, 13, 15.0]),
        loss=np.ones(10),
        weight=np.ones(10),
    )
    np.testing.assert_allclose(tenths(steps), [1.0] * 5 + [0.5] * 5)
    assert len(tenths(even_steps(9))) == 0


def test_diverged_losses_are_counted_and_kept():
    run = fake_run("single", num_steps=20, nan_from=15).snapshot()
    assert num_diverged(run) == 5
    assert np.isnan(steps_of(run).loss).sum() == 5


def test_a_loop_that_never_logs_a_loss_did_not_diverge():
    run = Run(run_id="m", name="mine")
    run.add(batch("m", [step(0, 1.0, math.nan)]))
    assert num_diverged(run.snapshot()) == 0
