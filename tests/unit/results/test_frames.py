import math
import random
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ddpnb.protocol.messages import Evaluation, Mark, MarkKind, Parts
from ddpnb.protocol.notation import Target
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.comparison import overlay
from ddpnb.results.curve import smoothed
from ddpnb.results.frames import Row, strategy_rows
from ddpnb.results.run import Run, Status
from tests.unit.results.fake_runs import (
    compared,
    ended_run,
    fake_comparison,
    fake_run,
    run_of,
    spec,
    step,
)


def timed(strategy: str, seconds: tuple[float, ...], repeat: int = 0, samples: int = 100) -> Run:
    """Return a run in which each worker trained ``samples`` samples in the given seconds."""
    steps = [[step(0, lasted, samples=samples)] for lasted in seconds]
    return ended_run(strategy, *steps, repeat=repeat, comparison="digits-1")


def repeated(**rates: tuple[float, ...]) -> tuple[Run, ...]:
    """Return runs of 100 samples, one repeat for each of the given samples/s."""
    return tuple(
        timed(name.replace("_", "-"), (100 / rate,), repeat)
        for name, each in rates.items()
        for repeat, rate in enumerate(each)
        if rate
    )


SCORES = (0.9, 0.7, 0.95)
"""The held-out accuracy of each repeat."""


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    """Three repeats with held-out curves. The second repeat has no ``no-comm``."""
    runs = []
    for run in fake_comparison(("single", "no-comm", "ddp", "async"), repeats=3).runs:
        if (run.name, run.repeat) == ("no-comm", 1):
            continue
        first, *others = run.reports
        judged = replace(
            first,
            evaluations=(Evaluation(run.num_samples // 2, run.seconds / 2, 0.5, 0.5),),
            held_out_accuracy=SCORES[run.repeat],
            held_out_metrics={"f1": 0.1 * run.repeat},
        )
        runs.append(replace(run, reports=(judged, *others)))
    return ComparisonResult(fake_comparison(()).with_runs(runs))


def rows_of(result: ComparisonResult, target: Target | None = None) -> dict[str, Row]:
    return {row["strategy"]: row for row in strategy_rows(result.comparison, target)}


def geometric(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean()))


def rates_of(result: ComparisonResult) -> pd.Series:
    """Divide the samples of all ranks by the seconds of the slowest rank, per run."""
    runs = result.steps().groupby(["strategy", "repeat"])
    return runs.num_samples.sum() / runs.seconds.max()


def test_speeds_and_their_ratios_follow_from_the_steps(result: ComparisonResult):
    found, rates = rows_of(result), rates_of(result)
    for name, row in found.items():
        assert row["samples_per_second"] == pytest.approx(geometric(rates[name]))
        ends = row["samples_per_second_low"], row["samples_per_second_high"]
        assert ends == (min(rates[name]), max(rates[name])), "only what was measured is shown"
        ratio = geometric((rates[name] / rates["single"]).dropna())
        assert row["speed_up"] == pytest.approx(ratio)
        if name != "single":
            assert row["efficiency"] == pytest.approx(ratio / 2)
            parts = row["machine"] * row["communication"]
            assert row["efficiency"] == pytest.approx(parts, rel=1e-12)
            assert row["ideal"] == 2 * found["single"]["samples_per_second"]
            both = geometric((rates["no-comm"] / rates["single"]).dropna())
            assert row["machine"] == pytest.approx(both / 2)


def test_what_a_step_takes_and_sends_follows_from_the_steps(result: ComparisonResult):
    steps, found = result.steps(), rows_of(result)
    for name, each in steps.groupby("strategy"):
        parts = each.filter(like="_seconds").drop(columns="hidden_seconds").mean()
        exposed = (parts.communication_seconds + parts.waiting_seconds) / parts.sum()
        assert found[name]["step_seconds"] == pytest.approx(parts.sum())
        assert np.nan_to_num(found[name]["exposed"]) == pytest.approx(exposed)
        assert np.nan_to_num(found[name]["bytes_sent_per_step"]) == each.num_bytes_sent.mean()
        stale = each.staleness.dropna()
        if len(stale):
            assert found[name]["staleness_median"] == stale.median()
            assert found[name]["staleness_max"] == stale.max()


def test_scores_follow_from_the_evaluations(result: ComparisonResult):
    last = result.evaluations().groupby(["strategy", "repeat"]).last()
    for name, found in rows_of(result).items():
        own = last.loc[name]
        assert found["final_loss"] == own.final_loss.median()
        assert found["held_out_loss"] == own.loss.median()
        assert found["held_out_accuracy"] == own.accuracy.median()
        assert found["held_out_f1"] == pytest.approx(own.held_out_f1.median())


def test_the_public_frames_have_the_rows_that_table_and_sentence_use(result: ComparisonResult):
    runs, strategies = result.runs(), result.strategies()
    assert len(runs) == len(result.comparison.runs)
    speeds = runs.groupby("strategy", sort=False).samples_per_second.agg(geometric)
    assert strategies.set_index("strategy").samples_per_second.to_dict() == pytest.approx(
        speeds.to_dict()
    )
    assert strategies.num_runs.sum() == len(runs)
    ratio = result.ratios().set_index(["quantity", "strategy"]).ratio
    own = strategies.set_index("strategy").speed_up
    for name in ("ddp", "async"):
        assert ratio["samples_per_second", name] == pytest.approx(own[name])


def test_numbers_of_steps_keep_their_digits():
    draw = random.Random(0)
    seconds = [
        float(np.float32(round(draw.uniform(0, 10 ** draw.randint(-6, 3)), 6))) for _ in range(200)
    ]
    steps = [replace(step(i, 1.0), parts=Parts(forward=each)) for i, each in enumerate(seconds)]
    found = ComparisonResult(compared(ended_run("single", steps))).steps().forward_seconds
    assert found.tolist() == [pytest.approx(float(f"{each:.7g}"), rel=1e-15) for each in seconds]


def test_when_a_loss_was_reached_follows_from_the_steps():
    result = ComparisonResult(fake_comparison(("single", "ddp"), num_steps=300))
    reached = rows_of(result, Target(value=0.5))
    for run in result.comparison.runs:
        found = reached[run.name]
        steps = result.steps()
        updates = steps[steps.strategy == run.name].groupby("step")
        at = int(np.argmax(smoothed(run.curve) <= 0.5))
        ends, samples = updates.seconds.max().tolist(), updates.num_samples.sum().cumsum().tolist()
        assert ends[at - 1] <= found["seconds_to_target"] <= ends[at]
        assert samples[at - 1] <= found["samples_to_target"] <= samples[at]


def test_a_repeat_that_misses_the_target_is_worse_than_any():
    def run(name: str, repeat: int, loss: float) -> Run:
        return ended_run(name, [step(i, i + 1.0, loss) for i in range(3)], repeat=repeat)

    runs = [run("single", repeat, 0.1) for repeat in range(5)]
    runs += [run("ddp", repeat, 0.1 if repeat < 3 else 0.9) for repeat in range(5)]
    runs += [run("zero", repeat, 0.1 if repeat < 2 else 0.9) for repeat in range(5)]
    single, ddp, zero = strategy_rows(compared(*runs), Target(value=0.5))
    assert [each["num_missed_target"] for each in (single, ddp, zero)] == [0, 2, 3]
    assert (ddp["seconds_to_target"], ddp["seconds_to_target_high"]) == (1.0, math.inf)
    assert zero["seconds_to_target"] == math.inf


def test_steps_that_a_death_lost_are_noted():
    run = timed("ddp", (2.0, 2.0)).snapshot()
    died = replace(run, marks=(Mark(rank=1, seconds=0.9, kind=MarkKind.DIED),))
    on_purpose = replace(died, spec=replace(run.spec, kill=("1@100ms",)))
    for each, is_noted in ((died, True), (on_purpose, False)):
        (ddp,) = strategy_rows(fake_comparison(()).with_runs([each]))
        assert ("this rank's last half second" in ddp["notes"][0]) == is_noted


def test_speed_up_is_over_the_devices_and_the_single_of_its_own_comparison():
    """Two workers that share a GPU count as one device."""
    single, ddp = (timed(name, (1.0,)).snapshot() for name in ("single", "ddp"))
    ddp = replace(ddp, run_id="shared", header=replace(ddp.header, num_devices=1))
    fast = [replace(run, comparison="other", run_id=run.name) for run in (single, ddp)]
    slow = timed("single", (4.0,), 1).snapshot()
    rows = strategy_rows(fake_comparison(()).with_runs([slow, *fast]))
    found = {(row["comparison"], row["strategy"]): row for row in rows}
    both = found["other", "ddp"]
    assert both["speed_up"] == both["efficiency"] == pytest.approx(1.0)
    assert both["ideal"] == found["other", "single"]["samples_per_second"]
    (alone,) = strategy_rows(fake_comparison(()).with_runs([ddp]))
    assert math.isnan(alone["speed_up"])
    assert math.isnan(alone["efficiency"])


def test_a_ceiling_is_as_fast_as_if_all_workers_were_as_slow_as_the_slowest():
    steps = [
        [step(i, 4.0 * (i + 1) / num, samples=100) for i in range(num)]  # both ranks take 4 s
        for num in (1, 3)
    ]
    added, asked = (replace(spec("no-comm"), is_ceiling=is_added) for is_added in (True, False))
    ceiling = ended_run(added, *steps).snapshot()
    assert ceiling.samples_per_second == 2 * 100 / 4
    assert ceiling.curve.samples.tolist() == [200], "steps of only one rank must not count"
    assert ended_run(asked, *steps).snapshot().samples_per_second == 400 / 4


def test_what_is_wrong_with_a_run_is_noted():
    good, bad = timed("single", (4.0,)), timed("single", (50.0,), 1)
    bad.end(Status.FAILED, "rank 0 was killed")
    short, diverged = timed("ddp", (3.9,)), fake_run("async", num_steps=20, nan_from=17)
    empty = run_of(spec("zero"), comparison="digits-1")
    single, ddp, async_, zero = strategy_rows(compared(good, bad, short, diverged, empty))
    assert single["samples_per_second"] == pytest.approx(25.0), "the failed run must not count"
    assert single["notes"] == ("failed: rank 0 was killed",)
    assert (single["is_short"], ddp["is_short"]) == (False, True)
    assert async_["num_diverged"] == 6
    assert "6 losses were NaN or infinite" in async_["notes"]
    assert math.isnan(zero["samples_per_second"])
    assert zero["status"] == "running"


def test_overlaying_keeps_each_run_once_and_what_is_shared():
    one = fake_comparison(("ddp",))
    other = replace(one, comparison_id="2", name="b", task="synthetic", environment={"torch": "x"})
    both = overlay([one, other])
    assert len(both.runs) == 1
    assert (both.name, both.environment) == ("digits-1, b", {})
    assert set(both.differing) == {"torch", "python", "host"}


def test_nothing_is_measured_against_a_run_that_is_under_way():
    ended, under_way = fake_run("ddp", num_steps=60), fake_run("single", num_steps=60, share=0.5)
    for baseline, known in ((under_way, False), (fake_run("single", num_steps=60), True)):
        ddp, _ = strategy_rows(compared(ended, baseline))
        assert math.isfinite(ddp["speed_up"]) == known


@pytest.mark.parametrize("num_repeats", [1, 2, 3, 30])
@pytest.mark.parametrize("seed", range(5))
def test_every_number_is_inside_the_range_of_its_repeats(num_repeats: int, seed: int):
    """Repeats fail at random, also all repeats of a strategy."""
    draw = random.Random(f"{num_repeats} {seed}")
    rates = {
        name: tuple(draw.uniform(10, 400) for _ in range(num_repeats))
        for name in ("single", "no_comm", "ddp", "zero")
    }
    runs = repeated(**rates)
    for run in runs:
        if draw.random() < 0.3:
            run.end(Status.FAILED, "rank 0 was killed")
    result = ComparisonResult(compared(*runs))
    finished = result.runs().query("status == 'finished'")
    for row in result.rows:
        own = finished[finished.strategy == row["strategy"]].samples_per_second
        if len(own) > 1:
            ends = row["samples_per_second_low"], row["samples_per_second_high"]
            assert ends == (own.min(), own.max())
            assert ends[0] <= row["samples_per_second"] <= ends[1]
        assert row["num_runs"] == len(own) or len(own) == 0
        assert (row["status"] == "failed") <= (len(own) < num_repeats)
    for row in result.ratios().itertuples():
        assert row.low <= row.ratio <= row.high or math.isnan(row.low)
        assert 1 <= row.num_repeats <= num_repeats
        assert row.repeats_needed == 0 or row.num_repeats < row.repeats_needed <= 30
    assert result.sentence()
    assert all(row["label"] in result.table().text() for row in result.rows)
