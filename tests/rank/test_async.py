"""Is the asynchronous strategy asynchronous, and honest about staleness, on one host and across?"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.servers.store import ParameterAccess
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.strategies.hogwild import Hogwild
from tests.rank.fit import Fit, Problem, by_hand, distance, drive, optimum
from tests.rank.hold import hold_rank_1, unhurried, wait_for
from tests.rank.ranks import make_state

OPTIONS = [
    {"bound": 0},
    {"bound": 1, "compensate": 2.0},
]
KINDS = [
    ("host", AsyncParameterServer, {}),
    ("hosts", AsyncParameterServer, {}),
    ("host", AsyncParameterServer, {"bound": 1}),
    ("host", Hogwild, {}),
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
    fields=MappingProxyType({}),
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


@pytest.mark.parametrize("kind", [AsyncParameterServer, Hogwild])
def test_a_gradient_is_staler_while_others_make_updates(ranks, tmp_path, kind):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 10)
    results = ranks(3).call(fit_async, problem, {}, "host", hold, kind)
    assert_honest(results, problem)
    assert results[1][0].reports[2].staleness > 0  # rank 0 made an update while rank 1 was held


def assert_honest(results, problem: Problem) -> None:
    fits = [fit for fit, _ in results]
    for rank, fit in enumerate(fits):
        assert [report.staleness for report in fit.reports] == recomputed(fits[0].log, rank)
        assert distance(fit, fits[0]) == 0
    assert sum(len(fit.reports) for fit in fits) == problem.order(3).num_steps * 3
    assert sum(r.num_samples for fit in fits for r in fit.reports) == problem.order(3).num_samples


@pytest.mark.parametrize("way", WAYS)
def test_a_bound_of_0_is_synchronous(ranks, way):
    problem = Problem(optimizer="adam", num_epochs=3)
    fits = [fit for fit, _ in ranks(3).call(fit_async, problem, {"bound": 0}, way)]
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


@pytest.mark.parametrize("bound", [0, 2])
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


def test_what_a_strategy_cannot_do_is_refused():
    with pytest.raises(UserError, match="leave compensate out"):
        AsyncParameterServer(bound=0, compensate=0.04).plan(make_state(0, 2))
    for name in ("async", "hogwild"):
        for value in ("0", "-1", "soon"):
            with pytest.raises(UserError, match=f"{name}:timeout"):
                make_strategy(f"{name}:timeout={value}", {})
    for device in ("cuda:0", "mps"):
        with pytest.raises(UserError, match="compare async"):
            Hogwild().plan(replace(make_state(0, 2), device=device))


@pytest.mark.parametrize(("way", "kind", "options"), KINDS)
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, way, kind, options):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=90, batch_size=16)
    fit, _ = ranks(2).call(fit_async, problem, options, way, unhurried, kind)[0]
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", [AsyncParameterServer, Hogwild])
@pytest.mark.parametrize("way", WAYS)
def test_a_slow_worker_delays_no_other_and_leaves_it_its_shards(ranks, tmp_path, way, kind):
    if way == "hosts" and kind is Hogwild:
        pytest.skip("no memory is shared across hosts")
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 220)
    (fast, _), (slow, _) = ranks(2).call(fit_async, problem, {}, way, hold, kind)
    assert len(fast.reports) >= 220 > 3 * len(slow.reports)
    assert distance(fast, slow) == 0


def test_ranks_of_several_hosts_share_no_memory(ranks):
    for failure in ranks(2).attempt(fit_async, Problem(), {}, "hosts", None, Hogwild):
        assert isinstance(failure.cause, UserError)


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
