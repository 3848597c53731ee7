"""Is the asynchronous strategy asynchronous, honest about staleness, and quick to fail?"""

import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from ddpnb.rank.strategies import STRATEGIES
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.transport.master import Access
from ddpnb.rank.transport.message import RankLostError
from tests.rank.fit import Problem, by_hand, by_strategy, distance, drive


def test_staleness_is_what_the_log_of_reads_and_writes_says(ranks):
    fits = ranks(3).call(by_strategy, "async", Problem(num_epochs=20))
    for rank, fit in enumerate(fits):
        reported = [report.staleness for report in fit.reports]
        assert reported == recomputed(fits[0].log, rank)
    assert max(report.staleness for fit in fits for report in fit.reports) > 0


def test_the_samples_are_those_of_a_synchronous_run(ranks):
    problem = Problem(num_epochs=2.5)
    fits = ranks(3).call(by_strategy, "async", problem)
    assert sum(r.num_samples for fit in fits for r in fit.reports) == problem.order(3).num_samples


def test_it_finds_the_known_optimum_of_a_convex_problem(ranks):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=60, batch_size=16)
    inputs, targets = problem.data()
    ones = torch.ones(len(inputs), 1)
    optimum = torch.linalg.lstsq(torch.cat([inputs, ones], dim=1), targets).solution
    weight, bias = ranks(2).call(by_strategy, "async", problem)[0].parameters
    torch.testing.assert_close(weight, optimum[:6].T, atol=1e-3, rtol=0)
    torch.testing.assert_close(bias, optimum[6], atol=1e-3, rtol=0)


def test_one_pass_moves_the_parameters_as_far_as_synchronous_sgd(ranks):
    problem = Problem(model="linear", learning_rate=1e-4, num_epochs=1)
    fit = ranks(3).call(by_strategy, "async", problem)[0]
    reference = by_hand(problem, 3)
    start = replace(fit, parameters=[p.detach() for p in problem.build().parameters()])
    moved = distance(reference, start)
    assert distance(fit, reference) < 0.02 * moved


def test_a_slow_worker_holds_nobody_up(ranks):
    fast, slow = ranks(2).call(by_strategy, "async", Problem(num_epochs=10), slow_down)
    assert len(fast.reports) > 3 * len(slow.reports)
    assert distance(fast, slow) == 0


@pytest.mark.parametrize("name", ["ddp", "async"])
def test_where_a_worker_is_killed_the_others_fail_soon(fresh_ranks, name):
    group = fresh_ranks(3)
    started = time.monotonic()
    failures = group.attempt(by_strategy, name, Problem(num_epochs=200), kill_rank_1)
    assert time.monotonic() - started < 15
    assert [failure.cause is None for failure in failures] == [False, True, False]
    assert all(isinstance(f.cause, RuntimeError) for f in failures if f.cause)
    assert list(group.folder.iterdir()) == []


def test_where_a_worker_raises_the_others_are_told_who(ranks):
    first, second, third = ranks(3).attempt(
        by_strategy, "async", Problem(num_epochs=50), raise_on_rank_1
    )
    assert isinstance(second.cause, ZeroDivisionError)
    assert isinstance(first.cause, RankLostError)
    assert first.cause.args == third.cause.args
    assert "Rank 1 left" in str(third.cause)
    assert list(ranks(3).folder.iterdir()) == []


def test_where_a_worker_hangs_the_others_give_up(ranks):
    started = time.monotonic()
    failures = ranks(3).attempt(hang_on_rank_1, Problem(num_epochs=50))
    assert time.monotonic() - started < 10
    assert "Rank 1 left" in str(failures[0].cause)
    assert "Rank 1 left" in str(failures[2].cause)


def test_where_the_server_fails_rank_0_says_of_what(ranks):
    first, second = ranks(2).attempt(break_optimizer, Problem())
    assert isinstance(first.cause, ZeroDivisionError)
    assert "Rank 0 left" in str(second.cause)


def recomputed(log: list[Access], rank: int) -> list[int]:
    """Staleness of each write of a rank: writes of others since its last read."""
    found, num_others = [], 0
    for access in log:
        if access.rank != rank:
            num_others += access.is_write
        elif access.is_write:
            found.append(num_others)
        else:
            num_others = 0
    return found


def slow_down(rank: int, step: int) -> None:
    time.sleep(0.03 if rank == 1 else 0.001)


def kill_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.002)


def raise_on_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        raise ZeroDivisionError
    time.sleep(0.002)


def hang(rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        time.sleep(4)


def hang_on_rank_1(state, folder, problem):
    strategy = AsyncParameterServer(timeout_seconds=1)
    try:
        drive(strategy, state, folder, problem, hang)
    finally:
        strategy.close()


def break_optimizer(state, folder, problem):
    strategy = STRATEGIES["async"]()
    try:
        drive(strategy, state, folder, BrokenProblem())
    finally:
        strategy.close()


class BrokenProblem(Problem):
    def factory(self):
        return partial(BrokenSgd, lr=0.1)


class BrokenSgd(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 5:
            raise ZeroDivisionError("broken optimizer")
