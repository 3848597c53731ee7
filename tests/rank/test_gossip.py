"""Does gossip never wait, average fairly, and report how stale its gradients are?"""

import itertools
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ddpnb.rank.strategies.replica import NullTimer

from ddpnb.rank.comm.parameter_store import ParameterAccess
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.gossip import Gossip, choose_peer
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.training.context import build_context
from tests.rank.fit import Fit, Problem, average, distance, drive, fit_of, optimum
from tests.rank.ranks import TIMEOUT_SECONDS, make_state
from tests.rank.test_deaths import LONG, unhurried
from tests.rank.test_options import spec_of

CALM = Problem(num_epochs=10, learning_rate=0.02)


def fit_gossip(
    state, folder, problem, before_step=None, timeout_seconds=60.0, joins=False, num_prefetched=0
):
    log: list[ParameterAccess] = []
    strategy = Gossip(timeout=timeout_seconds, log=log.append)
    try:
        fields = {"joins": joins, "num_prefetched": num_prefetched}
        fit: Fit = drive(strategy, state, folder, problem, before_step, **fields)
        return replace(fit, log=log), strategy.lost_shards()
    finally:
        strategy.close()
        strategy.close()


def test_under_a_straggler_the_other_goes_on_and_takes_more_shares(ranks, tmp_path):
    num_shards = LONG.order(2).num_steps * 2
    wait = partial(wait_until_rank_0_is_far, tmp_path / "far", 2 * num_shards // 3)
    (fast, lost), (slow, _) = ranks(2).call(fit_gossip, LONG, wait)
    assert len(fast.reports) + len(slow.reports) == num_shards
    assert len(fast.reports) > 2 * num_shards // 3
    assert lost == []


def wait_until_rank_0_is_far(far: Path, num_steps: int, rank: int, step: int) -> None:
    """Hold rank 1 in its third step."""
    if rank == 0 and step == num_steps:
        far.touch()
    if rank == 1 and step == 2:
        wait_for(far)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, num_ranks):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=90, batch_size=16)
    for fit, _ in ranks(num_ranks).call(fit_gossip, problem, unhurried):  # none finishes alone
        torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (3, 0), (3, 1)])
def test_in_turns_it_is_algorithm_1_of_the_paper(ranks, tmp_path, num_ranks, seed):
    problem = Problem(seed=seed)
    fits = ranks(num_ranks).call(fit_in_turns, problem, tmp_path)
    expected = algorithm_1(problem, num_ranks)
    for fit in fits:
        assert distance(fit, expected) < 1e-6
        assert {report.staleness for report in fit.reports} == {0}


def fit_in_turns(state, folder, problem, turns):
    """A step begins when the one before it, another rank's, has ended."""
    num_ranks, num_steps = state.world_size, problem.order(state.world_size).num_steps
    strategy = Gossip(log=lambda access: access.is_write and (turns / f"{access.version}").touch())
    (turns / "0").touch()
    ask = strategy.shards

    def shards():
        mine = ask()
        for turn in range(state.rank, num_ranks * num_steps, num_ranks):
            wait_for(turns / f"{turn}")
            yield next(mine)

    strategy.shards = shards
    try:
        return drive(strategy, state, folder, problem)
    finally:
        strategy.close()


def algorithm_1(problem: Problem, num_ranks: int) -> Fit:
    models = [problem.build() for _ in range(num_ranks)]
    optimizers = [problem.factory()(list(model.parameters())) for model in models]
    order, (inputs, targets) = problem.order(num_ranks), problem.data()
    for step, part in itertools.product(range(order.num_steps), range(num_ranks)):
        indices = order.indices(Shard(step=step, part=part, num_parts=num_ranks))
        optimizers[part].zero_grad()
        torch.nn.functional.mse_loss(models[part](inputs[indices]), targets[indices]).backward()
        other = choose_peer(problem.seed, part, step, range(num_ranks))
        assert other is not None
        average([models[part], models[other]])
        optimizers[part].step()
    average(models)
    return fit_of(models[0], [])


def test_staleness_is_what_the_logs_of_all_workers_say(ranks):
    fits = [fit for fit, _ in ranks(3).call(fit_gossip, CALM)]
    written = {a.version: a.rank for fit in fits for a in fit.log if a.is_write}
    assert sorted(written) == list(range(1, CALM.order(3).num_steps * 3 + 1))
    for rank, fit in enumerate(fits):
        recomputed = []
        for read, write in zip(fit.log[::2], fit.log[1::2], strict=True):
            assert (read.is_write, write.is_write) == (False, True)
            between = range(read.version + 1, write.version)
            recomputed.append(sum(written[version] != rank for version in between))
        assert [report.staleness for report in fit.reports] == recomputed
    assert max(report.staleness for fit in fits for report in fit.reports) > 0


def test_all_ranks_end_with_the_same_weights_and_leave_nothing(ranks):
    fits = [fit for fit, _ in ranks(3).call(fit_gossip, CALM)]
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    assert list(ranks(3).folder.iterdir()) == []


def test_the_choice_of_peers_is_random_and_follows_the_seed():
    def met(seed: int, rank: int) -> list[int | None]:
        return [choose_peer(seed, rank, step, range(4)) for step in range(3000)]

    assert met(0, 1) == met(0, 1)
    assert met(0, 1) != met(0, 2)
    assert sum(a == b for a, b in zip(met(0, 1), met(7, 1), strict=True)) < 1100  # a third
    assert all(900 < met(0, 1).count(other) < 1100 for other in (0, 2, 3))
    assert choose_peer(0, 1, 5, [1, 3]) == 3
    assert choose_peer(0, 0, 5, [0]) is None


def test_a_run_gives_its_seed_to_its_strategy():
    context = build_context(spec_of("gossip", seed=5), make_state(0, 2), {}, filename="here")
    assert context.replica("t", num_steps=1, timer=NullTimer()).seed == 5


def test_gpus_meet_in_pairs_and_that_is_said():
    on_cpu, on_gpu = make_state(0, 2), replace(make_state(0, 2), device="cuda:0")

    def plan(word, state):
        return make_strategy(word, {}, state.device).plan(state)

    assert not plan("gossip", on_cpu).synchronous
    assert plan("gossip:together=on", on_cpu) == plan("gossip:together=on", on_gpu)
    assert plan("gossip:together=on", on_gpu).notes == ()
    forced = plan("gossip", on_gpu)
    assert forced.synchronous
    assert "On GPUs gossip meets in pairs" in forced.notes[0]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS / 2
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.001)
