"""Is elastic averaging algorithm 1 of the paper, and does a worker wait for no other?"""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from ddpnb.rank.strategies.easgd import Easgd
from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.tasks.batches import Shard
from tests.rank.fit import Fit, Problem, distance, drive, fit_of, optimum
from tests.rank.hold import wait_for
from tests.rank.test_deaths import LONG, say_i_came, unhurried, wait_for_another
from tests.rank.test_gossip import wait_until_rank_0_is_far

CALM = Problem(num_epochs=10, learning_rate=0.02)
QUICK = Problem(num_epochs=24, model="linear", learning_rate=0.3)


def fit_easgd(
    state, folder, problem, before_step=None, timeout_seconds=60.0, joins=False, num_prefetched=0
):
    strategy = Easgd(every=3, timeout=timeout_seconds)
    try:
        fields = {"joins": joins, "num_prefetched": num_prefetched}
        fit: Fit = drive(strategy, state, folder, problem, before_step, **fields)
        return fit, strategy.lost_shards()
    finally:
        strategy.close()
        strategy.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("every", "beta"), [(1, 0.9), (4, 0.5)])
def test_in_turns_it_is_algorithm_1_of_the_paper(ranks, tmp_path, num_ranks, every, beta):
    problem = Problem(num_epochs=2)
    fits = ranks(num_ranks).call(fit_in_turns, problem, tmp_path, every, beta)
    expected = algorithm_1(problem, num_ranks, every, beta)
    assert all(distance(fit, expected) < 1e-6 for fit in fits)
    assert {report.staleness for fit in fits for report in fit.reports} == {None}


def fit_in_turns(state, folder, problem, turns, every, beta):
    """A step begins when the one before it, another rank's, has ended; so do the last moves."""
    num_ranks, num_steps = state.world_size, problem.order(state.world_size).num_steps
    strategy = Easgd(every=every, beta=beta)
    (turns / "0").touch()
    ask, finish = strategy.shards, strategy._move

    def shards():
        mine = ask()
        for turn in range(state.rank, num_ranks * num_steps, num_ranks):
            wait_for(turns / f"{turn}")
            yield next(mine)
            (turns / f"{turn + 1}").touch()
        wait_for(turns / f"{num_ranks * num_steps + state.rank}")
        strategy._move = last_move

    def last_move():
        sent = finish()
        (turns / f"{num_ranks * num_steps + state.rank + 1}").touch()
        return sent

    strategy.shards = shards
    try:
        return drive(strategy, state, folder, problem)
    finally:
        strategy.close()


def algorithm_1(problem: Problem, num_ranks: int, every: int, beta: float) -> Fit:
    models = [problem.build() for _ in range(num_ranks)]
    optimizers = [problem.factory()(list(model.parameters())) for model in models]
    centre = problem.build()
    order, (inputs, targets) = problem.order(num_ranks), problem.data()

    @torch.no_grad()
    def move(model: nn.Module) -> None:
        for mine, middle in zip(model.parameters(), centre.parameters(), strict=True):
            force = beta / num_ranks * (mine - middle)
            mine -= force
            middle += force

    for step, part in itertools.product(range(order.num_steps), range(num_ranks)):
        indices = order.indices(Shard(step=step, part=part, num_parts=num_ranks))
        optimizers[part].zero_grad()
        nn.functional.mse_loss(models[part](inputs[indices]), targets[indices]).backward()
        if (step + 1) % every == 0:
            move(models[part])
        optimizers[part].step()
    for model in models:
        move(model)
    return fit_of(centre, [])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_finds_the_known_optimum_of_a_convex_problem(ranks, num_ranks):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=90, batch_size=16)
    for fit, _ in ranks(num_ranks).call(fit_easgd, problem, unhurried):
        torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


def test_under_a_straggler_the_other_goes_on_and_takes_more_shares(ranks, tmp_path):
    num_shards = LONG.order(2).num_steps * 2
    wait = partial(wait_until_rank_0_is_far, tmp_path / "far", 2 * num_shards // 3)
    (fast, lost), (slow, _) = ranks(2).call(fit_easgd, LONG, wait)
    assert len(fast.reports) + len(slow.reports) == num_shards
    assert len(fast.reports) > 2 * num_shards // 3
    assert lost == []


def test_all_ranks_end_with_the_centre_and_rank_0_holds_it(ranks):
    fits = [fit for fit, _ in ranks(3).call(fit_easgd, CALM)]
    assert all(distance(fit, fits[0]) == 0 for fit in fits)
    size = sum(4 * p.numel() for p in CALM.build().parameters())
    assert [fit.memory.parameters for fit in fits] == [2 * size, size, size]
    assert list(ranks(3).folder.iterdir()) == []


def test_a_new_process_takes_a_dead_ones_place(fresh_ranks, tmp_path):
    group, came = fresh_ranks(2), tmp_path / "came"
    group.begin(fit_easgd, QUICK, partial(wait_for_another, came))
    group.processes[1].join(30)
    outside = group.start_outside(fit_easgd, 1, QUICK, partial(say_i_came, came), 60.0, True)
    (fit, lost), _ = group.end()
    joined, _ = outside.result()
    assert len(joined.reports) > 5
    assert joined.reports[0].loss < 0.3 * fit.reports[0].loss  # it begins with the centre
    assert len(fit.reports) + len(joined.reports) + 5 + len(lost) == QUICK.order(2).num_steps * 2
    assert distance(fit, joined) == 0
    assert list(group.folder.iterdir()) == []


@pytest.mark.parametrize("option", ["beta=0", "beta=1.5", "every=0"])
def test_a_rate_at_which_nothing_moves_or_all_flies_apart_is_refused(option):
    with pytest.raises(UserError, match=f"easgd:{option.partition('=')[0]} must be"):
        make_strategy(f"easgd:{option}", {})


def save_job(state, folder, sign: Path):
    """Train; return the weights that rank 0 saves in the middle, and its own."""
    strategy, seen = Easgd(every=2), []

    def before_step(rank: int, step: int) -> None:
        if rank == 0 and step == 4:
            replica = strategy._replica
            own = [p.detach().clone() for p in replica.parameters]
            seen.extend([own, list(strategy.save(replica)["model"].values())])
            assert all(map(torch.equal, own, replica.parameters))
            sign.touch()
        if rank == 1 and step == 1:
            wait_for(sign)  # rank 0 alone has moved the centre

    try:
        drive(strategy, state, folder, Problem(), before_step)
    finally:
        strategy.close()
    return seen


def test_a_checkpoint_holds_the_centre_and_leaves_rank_0s_weights(ranks, tmp_path):
    own, saved = ranks(2).call(save_job, tmp_path / "sign")[0]
    first = [p.detach() for p in Problem().build().parameters()]
    for mine, centre, start in zip(own, saved, first, strict=True):
        assert not torch.equal(mine, centre)
        assert (mine - centre).norm() < (mine - start).norm()
