"""Does gossip wait for nobody, average fairly, and say how stale its gradients are?"""

import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpnb.rank.lifeline import Lifeline
from ddpnb.rank.order import Share
from ddpnb.rank.strategies.gossip import Gossip
from ddpnb.rank.strategies.neighbours import chosen_by
from ddpnb.rank.transport.master import Access
from ddpnb.rank.transport.message import RankLostError, RunOverError
from ddpnb.rank.transport.packed import create_shared, map_copies, num_bytes
from ddpnb.rank.transport.weights import Weights
from tests.rank.fit import Fit, Problem, distance, drive, fit_of
from tests.rank.ranks import TIMEOUT_SECONDS, make_state
from tests.rank.test_deaths import (
    LONG,
    kill_rank_0,
    kill_rank_1,
    raise_on_rank_1,
    say_i_came,
    unhurried,
    wait_for_another,
)

CALM = Problem(num_epochs=10, learning_rate=0.02)
QUICK = Problem(num_epochs=24, model="linear", learning_rate=0.3)
LIKE = [torch.empty(5, 3), torch.empty(2, dtype=torch.float64)]


def fit_gossip(
    state, folder, problem, before_step=None, timeout_seconds=60.0, joins=False, num_ahead=0
):
    log: list[Access] = []
    strategy = Gossip(timeout_seconds=timeout_seconds, log=log.append)
    try:
        place = {"joins": joins, "num_ahead": num_ahead}
        fit: Fit = drive(strategy, state, folder, problem, before_step, **place)
        return replace(fit, log=log), strategy.lost_shares()
    finally:
        strategy.close()
        strategy.close()


def test_under_a_straggler_the_other_goes_on_and_takes_more_shares(ranks, tmp_path):
    num_shares = LONG.order(2).num_steps * 2
    wait = partial(wait_until_rank_0_is_far, tmp_path / "far", 2 * num_shares // 3)
    (fast, lost), (slow, _) = ranks(2).call(fit_gossip, LONG, wait)
    assert len(fast.reports) + len(slow.reports) == num_shares
    assert len(fast.reports) > 2 * num_shares // 3
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
    inputs, targets = problem.data()
    ones = torch.ones(len(inputs), 1)
    optimum = torch.linalg.lstsq(torch.cat([inputs, ones], dim=1), targets).solution
    for fit, _ in ranks(num_ranks).call(fit_gossip, problem, unhurried):  # none finishes alone
        torch.testing.assert_close(fit.parameters[0], optimum[:6].T, atol=1e-3, rtol=0)
        torch.testing.assert_close(fit.parameters[1], optimum[6], atol=1e-3, rtol=0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_in_turns_it_is_algorithm_1_of_the_paper(ranks, tmp_path, num_ranks):
    fits = ranks(num_ranks).call(fit_in_turns, Problem(), tmp_path)
    expected = algorithm_1(Problem(), num_ranks)
    for fit in fits:
        assert distance(fit, expected) < 1e-6
        assert {report.staleness for report in fit.reports} == {0}


def fit_in_turns(state, folder, problem, turns):
    """A step begins when the one before it, another rank's, has ended."""
    num_ranks, num_steps = state.world_size, problem.order(state.world_size).num_steps
    strategy = Gossip(log=lambda access: access.is_write and (turns / f"{access.version}").touch())
    (turns / "0").touch()
    ask = strategy.shares

    def shares():
        mine = ask()
        for turn in range(state.rank, num_ranks * num_steps, num_ranks):
            wait_for(turns / f"{turn}")
            yield next(mine)

    strategy.shares = shares
    try:
        return drive(strategy, state, folder, problem)
    finally:
        strategy.close()


def algorithm_1(problem: Problem, num_ranks: int) -> Fit:
    models = [problem.build() for _ in range(num_ranks)]
    optimizers = [problem.factory()(list(model.parameters())) for model in models]
    order, (inputs, targets) = problem.order(num_ranks), problem.data()
    for step, part in itertools.product(range(order.num_steps), range(num_ranks)):
        indices = order.indices(Share(step=step, part=part, num_parts=num_ranks))
        optimizers[part].zero_grad()
        torch.nn.functional.mse_loss(models[part](inputs[indices]), targets[indices]).backward()
        other = chosen_by(part, step, range(num_ranks))
        assert other is not None
        average([models[part], models[other]])
        optimizers[part].step()
    average(models)
    return fit_of(models[0], [])


@torch.no_grad()
def average(models) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(same) / len(same)
        for parameter in same:
            parameter.copy_(mean)


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


def test_whom_one_meets_is_random_and_repeatable():
    met = [chosen_by(1, step, range(4)) for step in range(3000)]
    assert met == [chosen_by(1, step, range(4)) for step in range(3000)]
    assert met != [chosen_by(2, step, range(4)) for step in range(3000)]
    assert all(900 < met.count(other) < 1100 for other in (0, 2, 3))
    assert chosen_by(1, 5, [1, 3]) == 3
    assert chosen_by(0, 5, [0]) is None


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_a_death_costs_one_share_and_those_ahead_and_the_others_train_the_rest(
    fresh_ranks, num_ahead
):
    group = fresh_ranks(3)
    (fit, lost), dead, (other, _) = group.attempt(
        fit_gossip, LONG, kill_rank_1, 60.0, False, num_ahead
    )
    assert dead.cause is None
    assert len(lost) == 1 + num_ahead
    assert len(fit.reports) + len(other.reports) + 5 + len(lost) == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert list(group.folder.iterdir()) == []


@pytest.mark.parametrize("place", ["averaging", "updating"])
def test_who_dies_with_a_lock_stops_nobody(fresh_ranks, place):
    group = fresh_ranks(3)
    (fit, lost), dead, (other, _) = group.attempt(fit_or_die, place)
    assert dead.cause is None
    assert len(lost) == 1
    assert len(fit.reports) + len(other.reports) + 4 + 1 == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert list(group.folder.iterdir()) == []


def fit_or_die(state, folder, place):
    """Rank 1 dies in its fifth step: with both locks, or with that of its own weights."""
    if state.rank != 1:
        return fit_gossip(state, folder, LONG, unhurried)
    if place == "averaging":
        average = Weights._average
        Weights._average = lambda *args: die_on_the_fifth_call() or average(*args)
    return fit_gossip(state, folder, Deadly() if place == "updating" else LONG, unhurried)


calls = itertools.count(1)


def die_on_the_fifth_call(*_: object) -> None:
    if next(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Deadly(Problem):
    num_epochs: float = LONG.num_epochs
    learning_rate: float | None = LONG.learning_rate

    def factory(self):
        def make(parameters):
            optimizer = Problem.factory(self)(parameters)
            optimizer.register_step_pre_hook(die_on_the_fifth_call)
            return optimizer

        return make


def test_a_new_process_takes_a_dead_ones_place(fresh_ranks, tmp_path):
    group, came = fresh_ranks(2), tmp_path / "came"
    group.begin(fit_gossip, QUICK, partial(wait_for_another, came))
    group.processes[1].join(30)
    outside = group.start_outside(fit_gossip, 1, QUICK, partial(say_i_came, came), 60.0, True)
    (fit, lost), _ = group.end()
    joined, _ = outside.result()
    assert len(joined.reports) > 5
    assert joined.reports[0].loss < 0.1 * fit.reports[0].loss  # it begins with others' weights
    assert len(fit.reports) + len(joined.reports) + 5 + len(lost) == QUICK.order(2).num_steps * 2
    assert distance(fit, joined) == 0
    assert list(group.folder.iterdir()) == []


def test_who_comes_when_all_is_over_is_told_so(ranks):
    assert ranks(2).start_outside(come_late, 1).result() == "over"


def come_late(state, folder):
    try:
        fit_gossip(state, folder, LONG, joins=True)
    except RunOverError:
        return "over"


def test_where_a_worker_raises_the_others_are_told_who(ranks):
    failures = ranks(3).attempt(fit_gossip, LONG, raise_on_rank_1)
    assert isinstance(failures[1].cause, ZeroDivisionError)
    assert isinstance(failures[0].cause, RankLostError)
    assert "Rank 1 left" in str(failures[2].cause)
    assert list(ranks(3).folder.iterdir()) == []


def test_the_death_of_rank_0_ends_the_run_with_a_sentence(fresh_ranks):
    failures = fresh_ranks(2).attempt(fit_gossip, LONG, kill_rank_0)
    assert failures[0].cause is None
    assert "Rank 0 left" in str(failures[1].cause)


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_where_rank_0_comes_to_no_mean_the_others_are_told(fresh_ranks, fate):
    group = fresh_ranks(2)
    group.call(fit_gossip, CALM)  # nobody is late because it is cold
    first, second = group.attempt(fit_without_a_mean, fate)
    assert isinstance(first.cause, RankLostError if fate == "hangs" else type(None))
    assert "Rank 0 left" in str(second.cause)


def fit_without_a_mean(state, folder, fate):
    if state.rank == 0:
        mean = Weights.mean
        Weights.mean = lambda *args: END[fate]() or mean(*args)
    return fit_gossip(state, folder, CALM, unhurried, 2.0)


END = {"dies": lambda: os.kill(os.getpid(), signal.SIGKILL), "hangs": lambda: time.sleep(7)}


def test_who_is_silent_is_given_up(ranks):
    ranks(3).call(fit_gossip, CALM)
    (fit, lost), second, (other, _) = ranks(3).attempt(fit_gossip, CALM, hang, 2.0)
    assert isinstance(second.cause, RankLostError)
    assert len(lost) == 1
    assert distance(fit, other) == 0


def hang(rank: int, step: int) -> None:
    if rank == 1 and step == 2:
        time.sleep(7)
    unhurried(rank, step)


def test_gpus_meet_in_pairs_and_that_is_said():
    on_cpu, on_gpu = make_state(0, 2), replace(make_state(0, 2), device="cuda:0")
    assert not Gossip().plan(on_cpu).synchronous
    assert Gossip(together=True).plan(on_cpu) == Gossip(together=True).plan(on_gpu)
    assert Gossip(together=True).plan(on_gpu).notes == ()
    forced = Gossip().plan(on_gpu)
    assert forced.synchronous
    assert "On GPUs gossip meets in pairs" in forced.notes[0]


def weights_in(folder: Path, num_copies: int, timeout_seconds: float = 60.0, lifeline=None):
    path = folder / "weights"
    copies = map_copies(path, LIKE, num_copies)
    return Weights(path, copies, timeout_seconds, lifeline or Lifeline()), copies


def some_weights(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(like.shape, generator=generator, dtype=like.dtype) for like in LIKE]


def average_often(state, folder):
    if state.rank == 0:
        create_shared(folder / "weights", state.world_size * num_bytes(LIKE))
    dist.barrier()
    weights, copies = weights_in(folder, state.world_size)
    weights.write(state.rank, some_weights(state.rank))
    dist.barrier()
    for step in range(300):
        with weights.averaged(state.rank, chosen_by(state.rank, step, range(state.world_size))):
            pass
    dist.barrier()
    weights.close()
    weights.close()
    (folder / "weights").unlink(missing_ok=True)
    return [[tensor.clone() for tensor in packed.tensors] for packed in copies]


def test_averages_in_pairs_keep_the_mean_and_lead_to_it(ranks):
    expected = [
        torch.stack(same).mean(dim=0) for same in zip(*map(some_weights, range(3)), strict=True)
    ]
    for found in ranks(3).call(average_often)[0]:
        for mine, mean in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, mean, atol=1e-5, rtol=0)


def test_two_take_the_mean_and_a_third_stays(tmp_path):
    create_shared(tmp_path / "weights", 3 * num_bytes(LIKE))
    weights, _ = weights_in(tmp_path, 3)
    for rank in range(3):
        weights.write(rank, [torch.full_like(like, 4.0 * rank) for like in LIKE])
    with weights.averaged(1, 0), weights.averaged(2, None):
        pass
    found = [torch.empty_like(like) for like in LIKE]
    for rank, value in enumerate([2.0, 2.0, 8.0]):
        weights.read(rank, found)
        assert all((tensor == value).all() for tensor in found)
    weights.close()


def wait_for_a_lock(state, folder):
    """Rank 0 holds its lock; rank 1 waits for it in vain, until its time is up or all is cut."""
    if state.rank == 0:
        create_shared(folder / "weights", 2 * num_bytes(LIKE))
    dist.barrier()
    lifeline = Lifeline()
    weights, _ = weights_in(folder, 2, 0.2, lifeline)
    causes = []
    with weights.averaged(0, None) if state.rank == 0 else contextlib.nullcontext():
        dist.barrier()
        for _ in range(2 * state.rank):
            try:
                weights.read(0, LIKE)
            except RuntimeError as error:
                causes.append(error)
            lifeline.cut()
        dist.barrier()
    weights.close()
    (folder / "weights").unlink(missing_ok=True)
    return causes


def test_who_waits_for_a_lock_is_freed_in_time(ranks):
    _, (late, cut) = ranks(2).call(wait_for_a_lock)
    assert isinstance(late, RankLostError)
    assert "freed from its wait" in str(cut)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS / 2
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.001)
