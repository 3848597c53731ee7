"""Is the asynchronous strategy asynchronous, and honest about staleness, on one host and across?"""

from functools import partial
from types import MappingProxyType

import pytest
import torch

from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from ddpnb.rank.strategies.hogwild import Hogwild
from tests.rank.fit import Fit, Problem, by_hand, distance, drive, optimum
from tests.rank.hold import hold_rank_1, unhurried

KINDS = [
    ("host", AsyncParameterServer, {}),
    ("hosts", AsyncParameterServer, {"compensate": 0.04}),
    ("host", AsyncParameterServer, {"bound": 1}),
    ("host", Hogwild, {}),
]
WAYS = ["host", "hosts"]
"""Through shared memory, or over TCP: each rank then has a folder of its own."""
kinds = pytest.mark.parametrize(("way", "kind", "options"), KINDS)


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
    strategy = kind(**options or {})
    strategy.plan(state)
    own = folder / f"own-{state.rank}" if way == "hosts" else folder
    own.mkdir(exist_ok=True)
    try:
        fit = drive(strategy, state, own, problem, before_step, **fields)
        return fit, strategy.queue.lost_shards if strategy.queue else []
    finally:
        strategy.close()
        strategy.close()
        if way == "hosts":
            own.rmdir()


@kinds
def test_every_shard_is_trained_once_and_all_have_the_same_weights(ranks, way, kind, options):
    problem = Problem(num_epochs=6, learning_rate=0.02)
    fits = [fit for fit, _ in ranks(3).call(fit_async, problem, options, way, unhurried, kind)]
    reports = [report for fit in fits for report in fit.reports]
    assert len(reports) == problem.order(3).num_steps * 3
    assert sum(report.num_samples for report in reports) == problem.order(3).num_samples
    assert max(distance(fit, fits[0]) for fit in fits) == 0
    assert all(0 <= report.staleness < len(reports) for report in reports)
    assert list(ranks(3).folder.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_bound_of_0_is_synchronous(ranks, way):
    problem = Problem(optimizer="adam", num_epochs=3)
    fits = [fit for fit, _ in ranks(3).call(fit_async, problem, {"bound": 0}, way)]
    reference = by_hand(problem, 3)
    assert all(distance(fit, reference) < 1e-5 for fit in fits)
    assert {report.staleness for fit in fits for report in fit.reports} == {0}


@kinds
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, way, kind, options):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=90, batch_size=16)
    fit, _ = ranks(2).call(fit_async, problem, options, way, unhurried, kind)[0]
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("way", "kind"), [(way, kind) for way, kind, options in KINDS if "bound" not in options]
)
def test_a_slow_worker_delays_no_other_and_its_gradient_is_staler(ranks, tmp_path, way, kind):
    problem = Problem(num_epochs=20, learning_rate=0.02)
    hold = partial(hold_rank_1, tmp_path / "sign", 220)
    (fast, _), (slow, _) = ranks(2).call(fit_async, problem, {}, way, hold, kind)
    assert len(fast.reports) >= 220 > 3 * len(slow.reports)
    assert slow.reports[2].staleness > 200
    assert distance(fast, slow) == 0


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_a_timeout_is_a_time(value):
    with pytest.raises(UserError, match="async:timeout"):
        make_strategy(f"async:timeout={value}", {})
