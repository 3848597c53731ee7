"""The claims of a result's sentence are true often enough, by simulation and by example."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpnb.protocol.notation import Target
from ddpnb.results.ratios import (
    SMALLEST_EFFECT,
    Verdict,
    accuracies_differ,
    log_ratios,
    ratio_row,
    ratio_rows,
    repeats_needed,
    standard_error,
)
from ddpnb.results.run import Run, Status
from tests.unit.results.fake_runs import compared, ended_run, fake_comparison, fake_run, step
from tests.unit.results.test_frames import repeated

NUM_COMPARISONS = 2_000


def is_claim(logs: np.ndarray, num_claims: int = 1) -> bool:
    return ratio_row(logs.tolist(), num_claims)["verdict"] == Verdict.DIFFERENT


@pytest.mark.parametrize("num_repeats", [3, 5, 30])
def test_equal_rates_are_claimed_to_differ_in_5_percent_of_sentences_at_most(num_repeats: int):
    random = np.random.default_rng(num_repeats)
    num_false = 0
    for _ in range(NUM_COMPARISONS):
        # The machine's speed differs between repeats, and each run varies by 6 %.
        logs = random.normal(0, 0.2, num_repeats) + random.normal(0, 0.06, (4, num_repeats))
        first, *others = logs
        num_false += any(is_claim(other - first, len(others)) for other in others)
    error = standard_error(0.05, NUM_COMPARISONS)  # of the simulation
    assert num_false / NUM_COMPARISONS <= 0.05 + 2.5 * error


@pytest.mark.parametrize("effect", [0.021, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8, 1.2])
@pytest.mark.parametrize("num_claims", [1, 3])
def test_the_advised_repeats_show_a_difference_in_80_percent_of_comparisons(
    effect: float, share: float, num_claims: int
):
    """``share`` is the standard deviation, divided by the effect."""
    deviation = share * effect
    num = repeats_needed(effect, deviation, 3, num_claims, math.log1p(SMALLEST_EFFECT))
    if num == 0:
        assert effect == 0.021 or share > 0.8, "too close to 2 %, or too many repeats"
        return
    random = np.random.default_rng(num)
    drawn = random.normal(effect, deviation, (NUM_COMPARISONS, num))
    power = np.mean([is_claim(logs, num_claims) for logs in drawn])
    assert power >= 0.8 - 0.025  # 2.8 standard errors of the simulation
    if num > 4:
        fewer = np.mean([is_claim(logs[: num - 2], num_claims) for logs in drawn])
        assert fewer < 0.85


def test_repeats_are_advised_only_for_an_undecided_ratio():
    wild = ratio_row(np.log([0.5, 1.0, 2.2]).tolist())
    assert (wild["verdict"], wild["repeats_needed"]) == (Verdict.UNDECIDED, 0)
    equal = ratio_row(np.log([1.0, 1.01, 0.99]).tolist())
    assert equal["repeats_needed"] == 0
    open_ = ratio_row(np.log([1.1, 1.8, 2.2]).tolist(), 5)
    assert open_["verdict"] == Verdict.UNDECIDED
    assert 3 < open_["repeats_needed"] <= 30


def test_the_interval_is_that_of_the_t_distribution():
    logs = np.log([1.0, 1.1, 1.21]).tolist()
    found, wider = ratio_row(logs), ratio_row(logs, 3)
    assert found["ratio"] == pytest.approx(1.1)
    half = 4.302653 * math.log(1.1) / math.sqrt(3)
    assert math.log(found["high"]) == pytest.approx(math.log(1.1) + half, rel=1e-6)
    assert wider["low"] < found["low"] < found["high"] < wider["high"]


@pytest.mark.parametrize(
    ("logs", "verdict"),
    [
        ([0.015] * 5, Verdict.SIMILAR),
        ([0.021] * 5, Verdict.DIFFERENT),
        ([-0.021] * 5, Verdict.DIFFERENT),
        ([0.001, -0.001, 0.0], Verdict.SIMILAR),
        ([0.0, 0.7, 0.1], Verdict.UNDECIDED),
        ([1.0, 1.0], Verdict.FEW_REPEATS),
        ([], Verdict.FEW_REPEATS),
        ([math.inf, 1.0, 1.0], Verdict.UNDECIDED),
    ],
)
def test_less_than_two_percent_is_not_claimed(logs: list[float], verdict: Verdict):
    assert ratio_row(logs)["verdict"] == verdict


def test_accuracies_differ_by_more_than_the_error_of_their_samples():
    assert 100 * standard_error(0.975, 360) == pytest.approx(0.8, abs=0.05)
    assert not accuracies_differ([0.972, 0.956], 360)
    assert accuracies_differ([0.972, 0.9], 360)
    assert not accuracies_differ([1.0, 0.99], 360)


def ratios(*runs: Run, quantity: str = "samples_per_second", target: Target | None = None):
    rows = ratio_rows(compared(*runs), target)
    return {row["strategy"]: row for row in rows if row["quantity"] == quantity}


def test_one_run_and_two_claim_nothing_but_say_what_they_span():
    one = ratios(fake_run("single"), fake_run("ddp"))["ddp"]
    assert 1 < one["low"] < one["ratio"] < one["high"], "ddp is 1.6 times as fast"
    two = ratio_row(np.log([2.0, 1.5]).tolist())
    assert (two["low"], two["high"]) == (pytest.approx(1.5), pytest.approx(2.0))
    assert one["verdict"] == two["verdict"] == Verdict.FEW_REPEATS


def test_emulated_strategies_and_the_ceiling_are_not_compared_by_speed():
    runs = repeated(single=(1, 1, 1), no_comm=(2, 2, 2), ddp=(3, 3, 3))
    assert list(ratios(*runs)) == ["ddp"]
    assert ratios(*runs[:6])["no-comm"]["ratio"] == pytest.approx(2)
    assert ratios(fake_run("single"), fake_run("dp")) == {}
    assert "dp" in ratios(fake_run("single"), fake_run("dp"), quantity="held_out_accuracy")


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_repeats_are_paired_and_what_one_of_the_two_lacks_is_left_out(is_by_hand: bool):
    """Runs of a hand-written loop have no repeat number. ddpnb pairs them by their order."""
    single, ddp = repeated(single=(1, 2, 4, 8)), repeated(ddp=(2, 4, 8, 16))
    if not is_by_hand:
        single[1].end(Status.FAILED, "rank 0 was killed")
    runs = [run.snapshot() for run in (*single, *ddp)]
    runs = [replace(run, spec=None) for run in runs] if is_by_hand else runs
    (paired,) = ratio_rows(fake_comparison(()).with_runs(runs))
    assert paired["num_repeats"] == (4 if is_by_hand else 3)
    assert paired["ratio"] == pytest.approx(2)


def test_a_missed_target_makes_a_ratio_infinite_and_claims_nothing():
    def run(name: str, repeat: int, loss: float) -> Run:
        steps = [step(i, (i + 1.0) * (2 if name == "ddp" else 1), loss) for i in range(3)]
        return ended_run(name, steps, repeat=repeat)

    runs = [run("single", repeat, 0.1) for repeat in range(4)]
    for losses, ratio in (((0.1,) * 4, 2.0), ((0.1, 0.1, 0.1, 0.9), math.inf)):
        others = [run("ddp", repeat, loss) for repeat, loss in enumerate(losses)]
        found = ratios(*runs, *others, quantity="seconds_to_target", target=Target(value=0.5))
        assert found["ddp"]["ratio"] == pytest.approx(ratio)
        is_finite = math.isfinite(ratio)
        assert found["ddp"]["verdict"] == (Verdict.DIFFERENT if is_finite else Verdict.UNDECIDED)
        assert math.isnan(found["ddp"]["high"]) != is_finite
    assert log_ratios({1: 1.0}, {2: 1.0}) == []


def test_a_metric_that_is_nan_in_one_repeat_is_left_out_of_its_ratio():
    runs = []
    for name, shares in (("single", (0.5, 0.6, 0.7, 0.8)), ("ddp", (0.5, math.nan, 0.7, 0.8))):
        for repeat, share in enumerate(shares):
            run = fake_run(name, repeat=repeat, num_steps=20)
            run.add_report(replace(run.snapshot().reports[0], held_out_accuracy=share))
            runs.append(run)
    found = ratios(*runs, quantity="held_out_accuracy")["ddp"]
    assert (found["num_repeats"], found["ratio"]) == (3, pytest.approx(1.0))
