"""Is the asynchronous strategy asynchronous, and honest about staleness, on one host and across?"""

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.rank.fit import Problem, by_hand, by_strategy, distance

KINDS = [
    ("host", "async"),
    ("hosts", "async:compensate=0.04"),
    ("host", "async:bound=1"),
    ("host", "hogwild"),
]
kinds = pytest.mark.parametrize(("way", "word"), KINDS)


def wait_for(sign: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 30.0
    while not sign.exists():
        assert time.monotonic() < deadline, f"the sign did not come: {sign.name}"
        time.sleep(0.002)


def hold_rank_1(sign: Path, num_steps: int, rank: int, step: int) -> None:
    """Before each step: hold rank 1 at its step 2 until rank 0 has made so many.

    Rank 0 waits until it is there, however busy the machine is.
    """
    held = sign.with_name("held")
    if rank == 1 and step == 2:
        held.touch()
        wait_for(sign)
    if rank == 0 and step == 3:
        wait_for(held)
    if rank == 0 and step == num_steps:
        sign.touch()


def unhurried(rank: int, step: int) -> None:
    """Before each step: leave the others time for theirs."""
    time.sleep(0.004)


@kinds
def test_every_shard_is_trained_once_and_all_have_the_same_weights(ranks, way, word):
    problem = Problem(num_epochs=6, learning_rate=0.02)
    fits = ranks(3).call(by_strategy, word, problem, unhurried, way)
    reports = [report for fit in fits for report in fit.reports]
    assert len(reports) == problem.order(3).num_steps * 3
    assert sum(report.num_samples for report in reports) == problem.order(3).num_samples
    assert max(distance(fit, fits[0]) for fit in fits) == 0
    assert all(0 <= report.staleness < len(reports) for report in reports)
    assert list(ranks(3).folder.iterdir()) == []


@pytest.mark.parametrize("way", ["host", "hosts"])
def test_a_bound_of_0_is_synchronous(ranks, way):
    problem = Problem(optimizer="adam", num_epochs=3)
    fits = ranks(3).call(by_strategy, "async:bound=0", problem, None, way)
    reference = by_hand(problem, 3)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert {report.staleness for fit in fits for report in fit.reports} == {0}


@kinds
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, way, word):
    problem = Problem(model="linear", learning_rate=0.2, num_epochs=45, batch_size=16)
    fit, _ = ranks(2).call(by_strategy, word, problem, unhurried, way)
    inputs, targets = problem.data()
    affine = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    best = torch.linalg.lstsq(affine, targets).solution
    torch.testing.assert_close(tuple(fit.parameters), (best[:6].T, best[6]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("way", "word"), [kind for kind in KINDS if "bound" not in kind[1]])
def test_a_slow_worker_delays_no_other_and_its_gradient_is_staler(ranks, tmp_path, way, word):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 220)
    fast, slow = ranks(2).call(by_strategy, word, problem, hold, way)
    assert len(fast.reports) >= 220 > 3 * len(slow.reports)
    assert slow.reports[2].staleness > 200
    assert distance(fast, slow) == 0
