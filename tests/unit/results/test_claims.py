"""The claims of a result's sentence are true often enough, by simulation and by example."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpnb.results.claims import Ratio, accuracies_differ, ratio, ratios_of, standard_error
from ddpnb.results.model import Run, Status
from ddpnb.results.summary import summarise
from tests.unit.results.fake_runs import compared, fake_comparison, fake_run
from tests.unit.results.test_summary import repeated

NUM_COMPARISONS = 2_000


@pytest.mark.parametrize("num_repeats", [3, 5])
def test_equal_rates_are_claimed_to_differ_in_5_percent_of_sentences_at_most(num_repeats: int):
    random = np.random.default_rng(num_repeats)
    num_false = 0
    for _ in range(NUM_COMPARISONS):
        # The machine's speed differs between repeats, and each run varies by 6 %.
        logs = random.normal(0, 0.2, num_repeats) + random.normal(0, 0.06, (4, num_repeats))
        first, *others = (dict(enumerate(row)) for row in np.exp(logs).tolist())
        num_false += any(ratio(other, first, len(others)).is_claim for other in others)
    assert num_false <= 0.05 * NUM_COMPARISONS


def test_as_many_repeats_as_are_advised_would_show_the_ratio():
    three = ratio({0: 1.1, 1: 1.8, 2: 2.2}, {0: 1.0, 1: 1.0, 2: 1.0}, 5)
    assert not three.is_claim
    num = three.num_repeats_needed
    for repeats, is_shown in ((num, True), (num - 1, False)):
        spread = np.linspace(-1, 1, repeats)
        logs = math.log(three.middle) + three.deviation * spread / spread.std(ddof=1)
        rates = dict(enumerate(np.exp(logs).tolist()))
        assert ratio(rates, dict.fromkeys(rates, 1.0), 5).is_claim == is_shown
    assert ratio({0: 1.0, 1: 1.01, 2: 0.99}, {0: 1.0, 1: 1.0, 2: 1.0}).num_repeats_needed == 0
    wild = ratio({0: 0.5, 1: 1.0, 2: 2.2}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert wild.num_repeats_needed == 0, "more repeats than anyone would run"


def test_the_interval_is_that_of_the_t_distribution():
    found = ratio({0: 1.0, 1: 1.1, 2: 1.21}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert found.middle == pytest.approx(1.1)
    half = 4.302653 * math.log(1.1) / math.sqrt(3)
    assert math.log(found.high) == pytest.approx(math.log(1.1) + half, rel=1e-6)
    wider = ratio({0: 1.0, 1: 1.1, 2: 1.21}, {0: 1.0, 1: 1.0, 2: 1.0}, 3)
    assert wider.low < found.low < found.high < wider.high


def test_less_than_two_percent_is_not_worth_words():
    just, more = (Ratio(middle=m, low=1.005, high=1.03, num_repeats=5) for m in (1.015, 1.021))
    assert not just.is_claim
    assert more.is_claim
    assert not Ratio(middle=1.4, low=0.99, high=1.9, num_repeats=5).is_claim


def test_one_run_and_two_claim_nothing_but_say_what_they_span():
    one = speeds(fake_run("single"), fake_run("ddp"))["ddp"]
    assert 1 < one.low < one.middle < one.high, "ddp is 1.6 times as fast"
    two = ratio({0: 2.0, 1: 1.5}, {0: 1.0, 1: 1.0})
    assert (two.low, two.high) == (pytest.approx(1.5), pytest.approx(2.0))
    assert not any(each.is_claim for each in (one, two))


def test_accuracies_differ_by_more_than_the_error_of_their_samples():
    assert 100 * standard_error(0.975, 360) == pytest.approx(0.8, abs=0.05)
    assert not accuracies_differ([0.972, 0.956], 360)
    assert accuracies_differ([0.972, 0.9], 360)
    assert not accuracies_differ([1.0, 0.99], 360)


def speeds(*runs: Run) -> dict[str, Ratio]:
    found = ratios_of(summarise(compared(*runs)))
    return {name: ratio for (_, name), ratio in found[1].items()}


def test_emulated_strategies_and_the_ceiling_are_not_compared_by_speed():
    runs = repeated(single=(1, 1, 1), no_comm=(2, 2, 2), ddp=(3, 3, 3))
    assert {name: each.num_claims for name, each in speeds(*runs).items()} == {"ddp": 1}
    assert speeds(*runs[:6])["no-comm"].middle == pytest.approx(2)
    assert speeds(fake_run("single"), fake_run("dp")) == {}


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_repeats_are_paired_and_what_one_of_the_two_lacks_is_left_out(is_by_hand: bool):
    """Runs of a hand-written loop have no repeat number. ddpnb pairs them by their order."""
    single, ddp = repeated(single=(1, 2, 4, 8)), repeated(ddp=(2, 4, 8, 16))
    if not is_by_hand:
        single[1].end(Status.FAILED, "rank 0 was killed")
    runs = [run.snapshot() for run in (*single, *ddp)]
    runs = [replace(run, spec=None) for run in runs] if is_by_hand else runs
    _, found = ratios_of(summarise(fake_comparison(()).with_runs(runs)))
    (paired,) = found.values()
    assert (paired.num_repeats, paired.middle) == (4 if is_by_hand else 3, pytest.approx(2))
