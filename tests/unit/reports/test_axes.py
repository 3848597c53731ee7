from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.reports.figures.axes import planned_samples, planned_seconds
from tests.unit.history.fake_runs import BATCH_SIZE, batch, header, run_of, spec, step

NUM_STEPS = 200


def trained(num_steps: int, status: Status = Status.RUNNING) -> Comparison:
    """Return a run of ``NUM_STEPS`` steps, each of 0.1 s, so many of which it has made."""
    planned = spec("single")
    run = run_of(planned, created=1.0)
    rows = [step(i, (i + 1) * 0.1, samples=BATCH_SIZE) for i in range(num_steps)]
    run.add(batch(planned.run_id, rows, header=header(planned, NUM_STEPS)))
    if status is not Status.RUNNING:
        run.end(status)
    return Comparison(comparison_id="c", name="c", runs=(run.snapshot(),))


def test_an_axis_reaches_to_the_end_that_is_foreseen():
    assert planned_samples(trained(20)) == BATCH_SIZE * NUM_STEPS
    end = planned_seconds(trained(20), 0.0)
    assert 20 <= end <= 30


def test_the_beginning_of_a_long_training_fills_its_axes():
    begun = trained(3)
    assert 3 * BATCH_SIZE < planned_samples(begun) <= 4 * BATCH_SIZE
    assert 0.3 < planned_seconds(begun, 0.0) <= 0.4


def test_it_stays_where_it_is_while_the_rate_does_and_follows_what_turns_out_otherwise():
    shown = planned_seconds(trained(20), 0.0)
    assert planned_seconds(trained(180), shown) == shown
    assert planned_seconds(trained(100), 5.0) >= 20
    assert planned_seconds(trained(100), 100.0) <= 30


def test_it_ends_where_runs_did_that_are_over():
    stopped = trained(50, Status.STOPPED)
    assert planned_seconds(stopped, 25.0) == 5.0
    assert planned_samples(stopped) == 50 * BATCH_SIZE
    nothing = Comparison(comparison_id="c", name="c", runs=())
    assert planned_seconds(nothing, 0.0) == planned_samples(nothing) == 0
