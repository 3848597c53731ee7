"""Is the asynchronous strategy asynchronous, and honest about staleness, on one host and across?"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.servers.store import ParameterAccess
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.strategies.hogwild import Hogwild
from tests.rank.fit import Fit, Problem, by_hand, by_strategy, distance, drive, optimum
from tests.rank.hold import hold_rank_1, wait_for
from tests.rank.ranks import make_state

OPTIONS = [
    {},
    {"period": 3},
    {"bound": 0},
    {"bound": 2},
    {"damping": True},
    {"period": 2, "bound": 1, "damping": True},
    {"period": 2, "compensate": 2.0, "damping": True},
]
WAYS = ["host", "hosts"]
"""Through shared memory, or through gloo: each rank then has a folder of its own."""


def fit_async(
    state,
    folder,
    problem,
    options=None,
    way="host",
    before_step=None,
    kind=AsyncParameterServer,
    **fields,
) -> tuple[Fit, list]:
    """Train; return also the shards that were lost."""
    log: list[ParameterAccess] = []
    strategy = kind(**options or {}, log=log.append)
    strategy.plan(state)
    own = folder / f"own-{state.rank}" if way == "hosts" else folder
    own.mkdir(exist_ok=True)
    try:
        fit = drive(strategy, state, own, problem, before_step, **fields)
        return replace(fit, log=log), list(strategy.lost_shards())
    finally:
        strategy.close()
        strategy.close()
        if way == "hosts":
            own.rmdir()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_staleness_is_what_the_log_of_reads_and_writes_says(ranks, way, options):
    problem = Problem(num_epochs=6, learning_rate=0.05)
    assert_honest(ranks(3).call(fit_async, problem, options, way), problem)
    assert list(ranks(3).folder.iterdir()) == []


def test_without_a_server_too(ranks, tmp_path):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 10)
    assert_honest(ranks(3).call(fit_async, problem, {}, "host", hold, Hogwild), problem)


def assert_honest(results, problem: Problem) -> None:
    fits = [fit for fit, _ in results]
    for rank, fit in enumerate(fits):
        assert [report.staleness for report in fit.reports] == recomputed(fits[0].log, rank)
        assert distance(fit, fits[0]) == 0
    assert sum(len(fit.reports) for fit in fits) == problem.order(3).num_steps * 3
    assert sum(r.num_samples for fit in fits for r in fit.reports) == problem.order(3).num_samples


def test_without_options_staleness_is_the_number_of_writes_by_others(ranks, tmp_path):
    hold = partial(hold_rank_1, tmp_path / "sign", 10)
    problem = Problem(num_epochs=20, learning_rate=0.02)
    fits = [fit for fit, _ in ranks(3).call(fit_async, problem, {}, "host", hold)]
    for rank, fit in enumerate(fits):
        assert [report.staleness for report in fit.reports] == writes_of_others(fits[0].log, rank)
    assert fits[1].reports[2].staleness > 0  # rank 0 made an update while rank 1 was held


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_bound_of_0_is_synchronous(ranks, way, optimizer):
    problem = Problem(optimizer=optimizer, num_epochs=3)
    fits = [fit for fit, _ in ranks(3).call(fit_async, problem, {"bound": 0}, way)]
    reference = by_hand(problem, 3)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert {report.staleness for fit in fits for report in fit.reports} == {0}
    has_files = [fit.num_files_while_training > 0 for fit in fits]
    assert has_files == [way == "host"] * 3  # neither memory nor sockets across hosts


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
    fits = [fit for fit, _ in ranks(3).call(fit_async, problem, {"bound": bound}, "host", hold)]
    clocks, largest = dict.fromkeys(range(3), 0), 0
    for access in fits[0].log:
        clocks[access.rank] += access.is_write
        if not access.is_write and clocks[access.rank] < len(fits[access.rank].reports):
            largest = max(largest, clocks[access.rank] - min(clocks.values()))
    assert largest == bound


@pytest.mark.parametrize("period", [1, 3, 4])
def test_a_period_makes_one_update_of_so_many_gradients(ranks, period):
    problem = Problem(num_epochs=2, learning_rate=0.05)
    results = ranks(2).call(fit_async, problem, {"period": period})
    num_gradients = sum(len(fit.reports) for fit, _ in results)
    assert results[0][0].log[-1].version == -(-num_gradients // period)


@pytest.mark.parametrize("option", [{"period": 2}, {"damping": True}, {"compensate": 0.04}])
def test_what_a_bound_of_0_implies_is_refused(option):
    with pytest.raises(UserError, match=f"leave {next(iter(option))} out"):
        AsyncParameterServer(bound=0, **option).plan(make_state(0, 2))


@pytest.mark.parametrize(
    "options", [{}, {"period": 2}, {"bound": 1}, {"compensate": 0.04}], ids=str
)
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, options):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=60, batch_size=16)
    fit, _ = ranks(2).call(fit_async, problem, options)[0]
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


def test_one_pass_moves_the_parameters_as_far_as_synchronous_sgd(ranks):
    problem = Problem(model="linear", learning_rate=1e-4, num_epochs=1)
    fit = ranks(3).call(by_strategy, "async", problem)[0]
    reference = by_hand(problem, 3)
    start = replace(fit, parameters=[p.detach() for p in problem.build().parameters()])
    assert distance(fit, reference) < 0.02 * distance(reference, start)


@pytest.mark.parametrize(
    ("way", "kind"),
    [("host", AsyncParameterServer), ("hosts", AsyncParameterServer), ("host", Hogwild)],
)
def test_a_slow_worker_delays_no_other_and_leaves_it_its_shards(ranks, tmp_path, way, kind):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 220)
    (fast, _), (slow, _) = ranks(2).call(fit_async, problem, {}, way, hold, kind)
    assert len(fast.reports) >= 220 > 3 * len(slow.reports)
    assert distance(fast, slow) == 0


def fit_twice(state, folder, problem, kind):
    """Set the strategy up again under another name, as after a warm-up."""
    fits = [fit_async(state, folder, problem, {}, kind=kind, name=name) for name in ("r", "t")]
    return [fit for fit, _ in fits]


@pytest.mark.parametrize("kind", [AsyncParameterServer, Hogwild])
def test_it_can_be_set_up_twice_in_a_row(ranks, kind):
    problem = Problem()
    for run in zip(*ranks(2).call(fit_twice, problem, kind), strict=True):
        assert sum(len(fit.reports) for fit in run) == problem.order(2).num_steps * 2
        assert distance(*run) == 0


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
