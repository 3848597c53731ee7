"""What does a death, a failure or a silence cost the other workers, without a server?"""

import itertools
import os
import signal
import time
from dataclasses import dataclass
from functools import partial

import pytest

from ddpnb.rank.comm.rendezvous import RankLostError, RunOverError
from ddpnb.rank.comm.work_queue import SharedWeights
from tests.rank.fit import Problem, distance
from tests.rank.test_deaths import (
    LONG,
    kill_rank_0,
    kill_rank_1,
    raise_on_rank_1,
    say_i_came,
    unhurried,
    wait_for_another,
)
from tests.rank.test_easgd import QUICK, fit_easgd
from tests.rank.test_gossip import CALM, fit_gossip
from tests.rank.test_hogwild import fit_hogwild


@pytest.mark.parametrize("fit", [fit_gossip, fit_hogwild, fit_easgd])
@pytest.mark.parametrize("num_prefetched", [0, 3])
def test_a_death_costs_one_share_and_those_ahead_and_the_others_train_the_rest(
    fresh_ranks, fit, num_prefetched
):
    group = fresh_ranks(3)
    (first, lost), dead, (third, _) = group.attempt(
        fit, LONG, kill_rank_1, 60.0, False, num_prefetched
    )
    assert dead.cause is None
    assert len(lost) == 1 + num_prefetched
    assert len(first.reports) + len(third.reports) + 5 + len(lost) == LONG.order(3).num_steps * 3
    assert distance(first, third) == 0
    assert list(group.folder.iterdir()) == []


@pytest.mark.parametrize("moment", ["averaging", "updating"])
def test_a_death_with_a_lock_held_stops_no_other(fresh_ranks, moment):
    group = fresh_ranks(3)
    (fit, lost), dead, (other, _) = group.attempt(fit_or_die, moment)
    assert dead.cause is None
    assert len(lost) == 1
    assert len(fit.reports) + len(other.reports) + 4 + 1 == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert list(group.folder.iterdir()) == []


def fit_or_die(state, folder, moment):
    """Rank 1 dies in its fifth step: with both locks, or with that of its own weights."""
    if state.rank != 1:
        return fit_gossip(state, folder, LONG, unhurried)
    if moment == "averaging":
        average = SharedWeights._average
        SharedWeights._average = lambda *args: die_on_the_fifth_call() or average(*args)
    return fit_gossip(state, folder, Deadly() if moment == "updating" else LONG, unhurried)


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


@pytest.mark.parametrize("fit", [fit_gossip, fit_hogwild, fit_easgd])
def test_a_worker_that_joins_after_the_end_gets_an_error(ranks, fit):
    assert ranks(2).start_outside(come_late, 1, fit).result() == "over"


def come_late(state, folder, fit):
    try:
        fit(state, folder, LONG, joins=True)
    except RunOverError:
        return "over"


@pytest.mark.parametrize("fit", [fit_gossip, fit_hogwild, fit_easgd])
def test_where_a_worker_raises_the_others_name_it(ranks, fit):
    failures = ranks(3).attempt(fit, LONG, raise_on_rank_1)
    assert isinstance(failures[1].cause, ZeroDivisionError)
    assert isinstance(failures[0].cause, RankLostError)
    assert "Rank 1 left" in str(failures[2].cause)
    assert list(ranks(3).folder.iterdir()) == []


@pytest.mark.parametrize("fit", [fit_gossip, fit_hogwild, fit_easgd])
def test_the_death_of_rank_0_ends_the_run_with_a_sentence(fresh_ranks, fit):
    failures = fresh_ranks(2).attempt(fit, LONG, kill_rank_0)
    assert failures[0].cause is None
    assert "Rank 0 left" in str(failures[1].cause)


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_where_rank_0_comes_to_no_mean_the_others_raise(fresh_ranks, end):
    group = fresh_ranks(2)
    group.call(fit_gossip, CALM)  # no rank is late because it is cold
    first, second = group.attempt(fit_without_a_mean, end)
    assert isinstance(first.cause, RankLostError if end == "hangs" else type(None))
    assert "Rank 0 left" in str(second.cause)


def fit_without_a_mean(state, folder, end):
    if state.rank == 0:
        mean = SharedWeights.mean
        SharedWeights.mean = lambda *args: END[end]() or mean(*args)
    return fit_gossip(state, folder, CALM, unhurried, 2.0)


END = {"dies": lambda: os.kill(os.getpid(), signal.SIGKILL), "hangs": lambda: time.sleep(7)}


def test_a_silent_worker_is_given_up(ranks):
    ranks(3).call(fit_gossip, CALM)
    (fit, lost), second, (other, _) = ranks(3).attempt(fit_gossip, CALM, hang, 2.0)
    assert isinstance(second.cause, RankLostError)
    assert len(lost) == 1
    assert distance(fit, other) == 0


def hang(rank: int, step: int) -> None:
    if rank == 1 and step == 2:
        time.sleep(7)
    unhurried(rank, step)
