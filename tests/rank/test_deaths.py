"""What does a worker's death, failure or silence cost the others, and can it come back?"""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpnb.protocol.errors import UserError
from ddpnb.rank.comm.rendezvous import RankLostError, RunOverError, announce_failure
from ddpnb.rank.strategies import make_strategy
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from tests.rank.fit import Problem, by_strategy, distance, drive
from tests.rank.hold import wait_for
from tests.rank.test_async import fit_async

LONG = Problem(num_epochs=24, learning_rate=0.02)


def test_a_death_ends_a_synchronous_run(fresh_ranks):
    group = fresh_ranks(3)
    started = time.monotonic()
    failures = group.attempt(by_strategy, "ddp", LONG, kill_rank_1)
    assert time.monotonic() - started < 15
    assert [failure.cause is None for failure in failures] == [False, True, False]
    assert all(isinstance(f.cause, RuntimeError) for f in failures if f.cause)


@pytest.mark.parametrize("options", [{}, {"bound": 0}, {"bound": 1}, {"period": 2}], ids=str)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_death_costs_one_share_and_the_others_train_the_rest(fresh_ranks, transport, options):
    group = fresh_ranks(3)
    first, dead, third = group.attempt(fit_and_lost, LONG, options, transport, kill_rank_1)
    assert dead.cause is None
    (fit, lost), (other, _) = first, third
    assert len(lost) == 1
    num_trained = len(fit.reports) + len(other.reports) + 5  # rank 1 made five steps
    assert num_trained + len(lost) == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert list(group.folder.iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"bound": 1}], ids=str)
def test_a_death_costs_also_what_is_fetched_ahead(fresh_ranks, options):
    group = fresh_ranks(3)
    results = group.attempt(fit_and_lost, LONG, options, "shm", kill_rank_1, False, 3)
    (fit, lost), (other, _) = results[0], results[2]
    assert len(lost) == 1 + 3
    assert len(fit.reports) + len(other.reports) + 5 + len(lost) == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0


@pytest.mark.parametrize("options", [{}, {"bound": 0}, {"bound": 1}], ids=str)
def test_over_rpc_a_death_is_noticed_by_the_process(fresh_ranks, options):
    group = fresh_ranks(3)
    started = time.monotonic()
    first, dead, third = group.attempt(fit_announced, LONG, options)
    assert time.monotonic() - started < 30  # by its silence: only after 60
    assert dead.cause is None
    (fit, lost), (other, _) = first, third
    assert len(lost) == 1
    assert len(fit.reports) + len(other.reports) + 5 + 1 == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert {path.suffix for path in group.folder.iterdir()} == {".pid"}


@pytest.mark.parametrize("options", [{}, {"bound": 1}], ids=str)
def test_a_new_process_takes_a_dead_ones_place(fresh_ranks, tmp_path, options):
    group, came = fresh_ranks(2), tmp_path / "came"
    group.begin(fit_and_lost, LONG, options, "auto", partial(wait_for_another, came))
    group.processes[1].join(30)
    before_step = partial(say_i_came, came)
    outside = group.start_outside(fit_and_lost, 1, LONG, options, "auto", before_step, True)
    (fit, lost), dead = group.end()
    joined, _ = outside.result()
    assert dead.cause is None
    assert len(joined.reports) > 5
    assert joined.reports[0].staleness is not None
    assert len(fit.reports) + len(joined.reports) + 5 + len(lost) == LONG.order(2).num_steps * 2
    assert distance(fit, joined) == 0
    assert list(group.folder.iterdir()) == []


def test_a_worker_that_joins_after_the_end_gets_an_error(ranks):
    outside = ranks(2).start_outside(come_late, 1)
    assert outside.result() == "over"


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_death_of_the_server_ends_the_run_with_a_sentence(fresh_ranks, transport):
    failures = fresh_ranks(2).attempt(fit_async, LONG, {}, transport, kill_rank_0)
    assert failures[0].cause is None
    assert "Rank 0 left" in str(failures[1].cause)


@pytest.mark.parametrize("transport", ["shm", "gloo", "rpc"])
def test_where_a_worker_raises_the_others_name_it(ranks, transport):
    group = ranks(3)
    first, second, third = group.attempt(fit_async, LONG, {}, transport, raise_on_rank_1)
    assert isinstance(second.cause, ZeroDivisionError)
    assert isinstance(first.cause, RankLostError)
    assert "Rank 1 left" in str(first.cause)
    assert isinstance(third.cause, RankLostError)
    assert "Rank 1 left" in str(third.cause) or transport == "rpc"
    assert list(group.folder.iterdir()) == []


def test_where_a_worker_fails_before_it_comes_the_others_fail_at_once(ranks):
    started = time.monotonic()
    failures = ranks(3).attempt(fail_early, LONG)
    assert time.monotonic() - started < 10
    assert isinstance(failures[1].cause, ZeroDivisionError)
    assert "Rank 1 left" in str(failures[0].cause)
    fits = ranks(3).call(by_strategy, "async", Problem())  # nothing of it is left behind
    assert distance(fits[0], fits[2]) == 0


def test_a_silent_worker_is_given_up(ranks, tmp_path):
    problem, sign = Problem(num_epochs=5), tmp_path / "sign"
    first, second, third = ranks(3).attempt(
        fit_by_name, "async:timeout=3", problem, partial(hang, sign), sign
    )
    assert "Rank 1 left" in str(second.cause)
    (fit, lost), (other, _) = first, third
    assert len(lost) == 1
    assert distance(fit, other) == 0


@pytest.mark.parametrize("name", ["async", "hogwild", "gossip", "easgd"])
def test_a_step_may_take_as_long_as_the_timeout_that_was_chosen(ranks, tmp_path, name):
    problem = Problem(num_epochs=3, learning_rate=0.02)
    num_shards = problem.order(2).num_steps * 2
    (fit, lost), (slow, _) = ranks(2).call(
        fit_by_name, f"{name}:timeout=40", problem, slow_on_rank_1
    )
    assert lost == []
    assert len(fit.reports) + len(slow.reports) == num_shards
    sign = tmp_path / "sign"
    (fit, lost), failure = ranks(2).attempt(
        fit_by_name, f"{name}:timeout=2", problem, partial(hang, sign), sign
    )
    assert "Rank 1 left" in str(failure.cause)
    assert "timeout=" in str(failure.cause)
    assert len(lost) == 1


def fit_by_name(state, folder, word, problem, before_step, sign=None):
    """Train; ``sign``: touched at the end, for a rank that hangs until then."""
    strategy = make_strategy(word, {})
    try:
        fit = drive(strategy, state, folder, problem, before_step)
        if sign is not None:
            sign.touch()
        return fit, strategy.lost_shards()
    finally:
        strategy.close()


def slow_on_rank_1(rank: int, step: int) -> None:
    """Rank 1 takes longer for its second step than the shorter of the timeouts."""
    if rank == 1 and step == 1:
        time.sleep(3)
    unhurried(rank, step)


@pytest.mark.parametrize("name", ["async", "hogwild", "gossip", "easgd"])
def test_a_timeout_is_a_number_of_seconds(name):
    for value in ("0", "-1", "soon"):
        with pytest.raises(UserError, match=f"{name}:timeout"):
            make_strategy(f"{name}:timeout={value}", {})


@pytest.mark.parametrize("transport", ["shm", "gloo", "rpc"])
def test_where_the_server_fails_rank_0_raises_its_error(ranks, transport):
    first, second = ranks(2).attempt(break_optimizer, transport)
    assert isinstance(first.cause, ZeroDivisionError)
    assert "Rank 0 left" in str(second.cause)


def fit_and_lost(
    state, folder, problem, options, transport, before_step, joins=False, num_prefetched=0
):
    strategy = AsyncParameterServer(**options)
    try:
        fields = {"transport": transport, "joins": joins, "num_prefetched": num_prefetched}
        fit = drive(strategy, state, folder, problem, before_step, **fields)
        return fit, strategy.lost_shards()
    finally:
        strategy.close()


def fit_announced(state, folder, problem, options):
    (folder / f"rank-{state.rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    return fit_and_lost(state, folder, problem, options, "rpc", kill_rank_1)


def come_late(state, folder):
    try:
        fit_async(state, folder, LONG, joins=True)
    except RunOverError:
        return "over"


def fail_early(state, folder, problem):
    with announce_failure("early", state.rank):
        if state.rank == 1:
            raise ZeroDivisionError
        return fit_async(state, folder, problem, name="early")


def kill_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    unhurried(rank, step)


def wait_for_another(came: Path, rank: int, step: int) -> None:
    """Kill rank 1; hold rank 0 up until another process has taken its place."""
    deadline = time.monotonic() + 30
    while step == 20 and not came.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_rank_1(rank, step)


def say_i_came(came: Path, rank: int, step: int) -> None:
    came.touch()
    unhurried(rank, step)


def kill_rank_0(rank: int, step: int) -> None:
    if rank == 0 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_on_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        raise ZeroDivisionError
    unhurried(rank, step)


def unhurried(rank: int, step: int) -> None:
    time.sleep(0.004)


def hang(sign: Path, rank: int, step: int) -> None:
    """Have rank 1 do nothing until there is a sign."""
    if rank == 1 and step == 2:
        wait_for(sign)
    unhurried(rank, step)


def break_optimizer(state, folder, transport):
    strategy = AsyncParameterServer()
    try:
        drive(strategy, state, folder, BrokenProblem(), transport=transport)
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
