import math
from dataclasses import replace
from importlib.metadata import version

import pytest

from ddpnb.history.comparison import Comparison, environment, overlay
from ddpnb.history.model import Run, Status
from ddpnb.history.summary import Spread, samples_per_second, summarise
from ddpnb.protocol.messages import Mark, MarkKind, RunReport
from tests.unit.history.fake_runs import (
    batch,
    fake_comparison,
    fake_run,
    header,
    run_of,
    spec,
    step,
)


def timed(strategy: str, seconds: tuple[float, ...], repeat: int = 0, samples: int = 100) -> Run:
    """A run whose workers each saw ``samples`` in the given seconds."""
    run_spec = spec(strategy, repeat)
    run = run_of(run_spec, comparison="digits-1", created=float(repeat))
    for rank, lasted in enumerate(seconds):
        events = [step(0, lasted, samples=samples)]
        run.add(batch(run.run_id, events, rank=rank, header=header(run_spec, 1)))
        run.add_report(
            RunReport(
                run_id=run.run_id,
                rank=rank,
                took_part=True,
                num_samples=samples,
                seconds=lasted,
                final_loss=0.5 if rank == 0 else math.nan,
                num_batches_sent=1,
            )
        )
    run.end(Status.FINISHED)
    return run


def compared(*runs: Run) -> Comparison:
    return Comparison(comparison_id="c", name="c", runs=tuple(r.snapshot() for r in runs))


def test_a_speed_up_over_repeats_is_the_geometric_mean_of_each_ones():
    singles = [timed("single", (1.0,), repeat) for repeat in range(2)]
    ddps = [timed("ddp", (seconds, seconds), repeat) for repeat, seconds in enumerate((1.0, 0.25))]
    _, ddp = summarise(compared(*singles, *ddps))
    assert ddp.speed_up == pytest.approx(4.0)  # of 2 and 8


def test_a_fault_that_did_not_strike_is_noted():
    run = timed("ddp", (2.0, 2.0)).snapshot()
    assert run.spec is not None
    faulty = replace(
        run,
        spec=replace(run.spec, kill=("1@30s", "0@100ms")),
        marks=(Mark(rank=0, seconds=0.7, kind=MarkKind.KILLED),),
    )
    (ddp,) = summarise(Comparison(comparison_id="c", name="c", runs=(faulty,)))
    assert ddp.notes == (
        "rank 0 killed at 0.7 s",
        "rank 1 was not killed: it began no step after 30 s",
    )


@pytest.mark.parametrize("event", [MarkKind.KILLED, MarkKind.DIED])
def test_steps_that_an_accidental_death_may_have_lost_are_noted(event: MarkKind):
    marks = (Mark(rank=1, seconds=0.7, kind=event),)
    run = replace(timed("async", (2.0, 2.0)).snapshot(), marks=marks)
    (summary,) = summarise(Comparison(comparison_id="c", name="c", runs=(run,)))
    lost = "its steps of the last half second before may be missing"
    assert summary.notes == (f"rank 1 {event} at 0.7 s; {lost}",)


def test_samples_per_second_waits_for_the_slowest_worker():
    assert samples_per_second(timed("ddp", (2.0, 4.0)).snapshot()) == 50.0


def test_a_rank_that_took_no_part_does_not_count():
    run = timed("ddp", (2.0,))
    run.add_report(RunReport(run_id=run.run_id, rank=1, took_part=False, seconds=99.0))
    assert samples_per_second(run.snapshot()) == 50.0


def test_a_run_without_reports_is_measured_by_its_events():
    run = run_of(spec("ddp"), comparison="c", created=1.0)
    run.add(batch(run.run_id, [step(0, 1.0, samples=10), step(1, 4.0, samples=10)]))
    assert samples_per_second(run.snapshot()) == 5.0


def test_a_report_that_is_missing_takes_no_samples_away():
    run = run_of(spec("ddp"), comparison="c", created=1.0)
    for rank in (0, 1):
        run.add(batch(run.run_id, [step(0, 4.0, samples=10)], rank=rank))
    run.add_report(
        RunReport(run_id=run.run_id, rank=1, took_part=True, num_samples=10, seconds=4.0)
    )
    run.end(Status.STOPPED, "interrupted")
    assert samples_per_second(run.snapshot()) == 5.0


def test_speed_up_and_efficiency_against_single():
    single, ddp = summarise(compared(timed("single", (4.0,)), timed("ddp", (2.0, 2.5))))
    assert (single.speed_up, single.efficiency) == (1.0, 1.0)
    assert ddp.samples_per_second.middle == 80.0
    assert ddp.speed_up == pytest.approx(80 / 25)
    assert ddp.efficiency == pytest.approx(1.6)
    assert ddp.final_loss.middle == 0.5


def test_without_single_there_is_no_speed_up():
    (ddp,) = summarise(compared(timed("ddp", (2.0, 2.0))))
    assert math.isnan(ddp.speed_up)
    assert math.isnan(ddp.efficiency)


def test_speed_up_is_measured_within_each_comparison():
    fast = replace(timed("single", (1.0,)).snapshot(), comparison="other", run_id="o1")
    slow = timed("single", (4.0,)).snapshot()
    ddp = replace(timed("ddp", (1.0, 1.0)).snapshot(), comparison="other", run_id="o2")
    by_key = {
        (s.comparison, s.name): s
        for s in summarise(Comparison(comparison_id="c", name="c", runs=(slow, fast, ddp)))
    }
    assert by_key["other", "ddp"].speed_up == 2.0


def test_repeats_give_median_and_range():
    runs = [timed("single", (seconds,), repeat) for repeat, seconds in enumerate((1.0, 2.0, 4.0))]
    (single,) = summarise(compared(*runs))
    assert single.samples_per_second == Spread(middle=50, low=25, high=100, over="repeats")
    assert single.num_runs == 3


def test_one_repeat_gives_the_range_over_tenths():
    (single,) = summarise(fake_comparison(("single",)))
    assert single.samples_per_second.over == "tenths"
    assert single.samples_per_second.low < single.samples_per_second.middle
    assert single.samples_per_second.high > single.samples_per_second.middle


def test_a_ceiling_is_as_fast_as_if_all_workers_were_as_slow_as_the_slowest():
    run = timed("no-comm", (4.0, 4.0)).snapshot()
    slow, fast = run.reports[0], replace(run.reports[1], num_samples=300)
    ceiling = replace(run, reports=(slow, fast), spec=replace(run.spec, is_ceiling=True))
    assert samples_per_second(ceiling) == 2 * 100 / 4
    assert samples_per_second(replace(run, reports=(slow, fast))) == 400 / 4


def test_a_run_of_less_than_four_seconds_is_too_short_to_time():
    runs = compared(timed("single", (3.9,)), timed("ddp", (4.1, 4.0)))
    assert [summary.is_short for summary in summarise(runs)] == [True, False]


def test_a_failed_repeat_does_not_bend_the_median_but_is_noted():
    good, bad = timed("single", (1.0,)), timed("single", (50.0,), 1)
    bad.end(Status.FAILED, "rank 0 was killed")
    (single,) = summarise(compared(good, bad))
    assert single.samples_per_second.middle == 100.0
    assert single.notes == ("failed: rank 0 was killed",)


def test_staleness_median_and_maximum():
    run = run_of(spec("async"), comparison="c", created=1.0)
    events = [step(i, i + 1.0, staleness=s) for i, s in enumerate((0, 1, 1, 7))]
    run.add(batch(run.run_id, events))
    (summary,) = summarise(compared(run))
    assert (summary.staleness_median, summary.staleness_max) == (1.0, 7.0)
    assert math.isnan(summarise(fake_comparison(("ddp",)))[0].staleness_max)


def test_nan_losses_and_lost_batches_are_noted():
    run = fake_run("single", num_steps=20, nan_from=17)
    run.add(batch(run.run_id, [], sequence=4))
    (summary,) = summarise(compared(run))
    assert summary.num_diverged == 3
    assert "3 losses were NaN or infinite" in summary.notes
    assert "3 batches of events never arrived" in summary.notes


def test_an_empty_run_is_summarised_without_numbers():
    (summary,) = summarise(compared(run_of(spec("ddp"), created=1.0)))
    assert math.isnan(summary.samples_per_second.middle)
    assert summary.status == "running"


def test_overlaying_keeps_each_run_once_and_what_is_shared():
    one = fake_comparison(("ddp",))
    other = replace(one, comparison_id="2", name="b", task="synthetic", environment={"torch": "x"})
    both = overlay([one, other])
    assert len(both.runs) == 1
    assert (both.name, both.task, both.environment) == ("digits-1, b", "", {})


def test_the_environment_says_where_and_with_what():
    found = environment()
    assert found["torch"] == version("torch")
    assert {"python", "host", "CPU cores", "ddpnb"} <= set(found)


def test_nothing_is_measured_against_a_run_that_is_under_way():
    ended, under_way = fake_run("ddp", num_steps=60), fake_run("single", num_steps=60, share=0.5)
    for baseline, known in ((under_way, False), (fake_run("single", num_steps=60), True)):
        runs = (ended.snapshot(), baseline.snapshot())
        ddp, _ = summarise(Comparison(comparison_id="c", name="c", runs=runs))
        assert math.isfinite(ddp.speed_up) == known
