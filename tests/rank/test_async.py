"""Is the asynchronous strategy asynchronous, and honest about staleness, by every transport?"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import rpc

from ddpnb.protocol.errors import UserError
from ddpnb.rank.comm.parameter_store import ParameterAccess
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from tests.rank.fit import Fit, Problem, by_hand, by_strategy, distance, drive, optimum
from tests.rank.hold import hold_rank_1, wait_for

TRANSPORTS = ["shm", "gloo", "rpc", "auto"]
OPTIONS = [
    {},
    {"period": 3},
    {"bound": 0},
    {"bound": 2},
    {"damping": True},
    {"period": 2, "bound": 1, "damping": True},
    {"compensate": 0.04},
    {"period": 2, "compensate": 2.0, "damping": True},
]


def fit_async(
    state, folder, problem, options=None, transport="auto", before_step=None, **fields
) -> Fit:
    log: list[ParameterAccess] = []
    strategy = AsyncParameterServer(**options or {}, log=log.append)
    try:
        fit = drive(strategy, state, folder, problem, before_step, transport=transport, **fields)
    finally:
        strategy.close()
        strategy.close()
    return replace(fit, log=log)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_staleness_is_what_the_log_of_reads_and_writes_says(ranks, transport, options):
    problem = Problem(num_epochs=6, learning_rate=0.05)
    fits = ranks(3).call(fit_async, problem, options, transport)
    log = fits[0].log
    for rank, fit in enumerate(fits):
        assert [report.staleness for report in fit.reports] == recomputed(log, rank)
        assert distance(fit, fits[0]) == 0
    assert sum(len(fit.reports) for fit in fits) == problem.order(3).num_steps * 3
    assert list(ranks(3).folder.iterdir()) == []


def test_without_options_staleness_is_the_number_of_writes_by_others(ranks, tmp_path):
    hold = partial(hold_rank_1, tmp_path / "sign", 10)
    fits = ranks(3).call(fit_async, Problem(num_epochs=20, learning_rate=0.02), {}, "auto", hold)
    for rank, fit in enumerate(fits):
        assert [report.staleness for report in fit.reports] == writes_of_others(fits[0].log, rank)
    assert fits[1].reports[2].staleness > 0  # rank 0 made an update while rank 1 was held


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_bound_of_0_is_synchronous(ranks, transport, optimizer):
    problem = Problem(optimizer=optimizer, num_epochs=3)
    fits = ranks(3).call(fit_async, problem, {"bound": 0}, transport)
    reference = by_hand(problem, 3)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert {report.staleness for fit in fits for report in fit.reports} == {0}


def hold_at_the_bound(sign: Path, bound: int, rank: int, step: int) -> None:
    """Hold rank 1 until rank 0 is as far ahead as it may be, and a moment longer."""
    if rank == 0 and step == 2 + bound:
        sign.touch()
    if rank == 1 and step == 2:
        wait_for(sign)
        time.sleep(0.3)  # in which no rank may get further


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_begins_further_ahead_than_the_bound(ranks, tmp_path, bound):
    problem = Problem(num_epochs=6, learning_rate=0.05)
    hold = partial(hold_at_the_bound, tmp_path / "sign", bound)
    fits = ranks(3).call(fit_async, problem, {"bound": bound}, "shm", hold)
    clocks, largest = dict.fromkeys(range(3), 0), 0
    for access in fits[0].log:
        clocks[access.rank] += access.is_write
        if not access.is_write and clocks[access.rank] < len(fits[access.rank].reports):
            largest = max(largest, clocks[access.rank] - min(clocks.values()))
    assert largest == bound


def test_a_period_makes_one_update_of_so_many_gradients(ranks):
    problem = Problem(num_epochs=2, learning_rate=0.05)
    for period in (1, 3, 4):
        fits = ranks(2).call(fit_async, problem, {"period": period})
        num_gradients = sum(len(fit.reports) for fit in fits)
        assert fits[0].log[-1].version == -(-num_gradients // period)


def fit_after_others(state, folder, problem):
    """Rank 0 has met for RPC before; rank 1 is a process that is new in its place."""
    rpc._init_counter = 3 if state.rank == 0 else 0
    return fit_async(state, folder, problem, {}, "rpc")


def test_over_rpc_a_new_process_meets_one_that_has_met_before(ranks):
    fits = ranks(2).call(fit_after_others, Problem(num_epochs=1))
    assert distance(*fits) == 0


def test_a_bound_of_0_and_a_period_exclude_each_other():
    with pytest.raises(UserError, match="leave period out"):
        AsyncParameterServer(period=2, bound=0)


def test_what_is_never_stale_cannot_be_damped():
    with pytest.raises(UserError, match="leave damping out"):
        AsyncParameterServer(damping=True, bound=0)


def test_what_is_never_stale_needs_no_compensation():
    with pytest.raises(UserError, match="leave compensate out"):
        AsyncParameterServer(compensate=0.04, bound=0)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_compensated_gradients_find_the_optimum_too(ranks, transport):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=60, batch_size=16)
    fit = ranks(2).call(fit_async, problem, {"compensate": 0.04}, transport)[0]
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


def fit_apart(state, folder, problem):
    """Train in a folder of this rank's own, as on a host of its own."""
    own = folder / f"own-{state.rank}"
    own.mkdir()
    try:
        return fit_async(state, own, problem, {"bound": 0})
    finally:
        own.rmdir()


def test_where_ranks_share_no_memory_gloo_takes_over(ranks):
    problem = Problem(num_epochs=2)
    for fit in ranks(2).call(fit_apart, problem):
        assert fit.num_files_while_training == 0  # neither memory nor sockets
        assert distance(fit, by_hand(problem, 2)) < 1e-5
    together = ranks(2).call(fit_async, problem, {"bound": 0})
    assert any(fit.num_files_while_training for fit in together)


def test_each_step_hands_over_the_gradients_bytes(ranks):
    problem = Problem(num_epochs=1)
    size = sum(4 * p.numel() for p in problem.build().parameters())
    for fit in ranks(2).call(fit_async, problem):
        assert {report.traffic.sent for report in fit.reports} == {size}


def test_the_samples_are_those_of_a_synchronous_run(ranks):
    problem = Problem(num_epochs=2.5)
    fits = ranks(3).call(by_strategy, "async", problem)
    assert sum(r.num_samples for fit in fits for r in fit.reports) == problem.order(3).num_samples


@pytest.mark.parametrize("options", [{}, {"period": 2}, {"bound": 1}], ids=str)
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, options):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=60, batch_size=16)
    fit = ranks(2).call(fit_async, problem, options)[0]
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


def test_one_pass_moves_the_parameters_as_far_as_synchronous_sgd(ranks):
    problem = Problem(model="linear", learning_rate=1e-4, num_epochs=1)
    fit = ranks(3).call(by_strategy, "async", problem)[0]
    reference = by_hand(problem, 3)
    start = replace(fit, parameters=[p.detach() for p in problem.build().parameters()])
    moved = distance(reference, start)
    assert distance(fit, reference) < 0.02 * moved


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_worker_delays_no_other(ranks, tmp_path, transport):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 220)
    fast, slow = ranks(2).call(fit_async, problem, {}, transport, hold)
    assert len(fast.reports) >= 220 > 3 * len(slow.reports)
    assert distance(fast, slow) == 0


def recomputed(log: list[ParameterAccess], rank: int) -> list[int]:
    """Staleness of each gradient of a rank: updates between its last read and its arrival."""
    found, version, version_read = [], 0, 0
    for access in log:
        if access.rank == rank and access.is_write:
            found.append(version - version_read)
        elif access.rank == rank:
            version_read = access.version
        version = access.version
    return found


def writes_of_others(log: list[ParameterAccess], rank: int) -> list[int]:
    """Staleness where each gradient makes an update: writes of others since the last read."""
    found, num_others = [], 0
    for access in log:
        if access.rank != rank:
            num_others += access.is_write
        elif access.is_write:
            found.append(num_others)
        else:
            num_others = 0
    return found
