"""What does a worker's death, failure or silence cost the others, and can it come back?"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ddpnb.rank.servers.client import RunOverError
from ddpnb.rank.strategies.async_ps import AsyncParameterServer
from tests.rank.fit import Problem, distance
from tests.rank.hold import unhurried, wait_for
from tests.rank.ranks import RankFailedError
from tests.rank.test_async import KINDS, fit_async, kinds

LONG = Problem(num_epochs=24, learning_rate=0.02)
on_one_host = pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for way, kind, options in KINDS if way == "host"]
)


@pytest.mark.parametrize(
    ("way", "kind", "options", "num_prefetched"),
    [
        *((way, kind, options, 0) for way, kind, options in KINDS),
        ("host", AsyncParameterServer, {"bound": 0}, 3),
    ],
)
def test_a_death_costs_what_the_dead_held_and_the_others_train_the_rest(
    fresh_ranks, way, kind, options, num_prefetched
):
    fields = {"num_prefetched": num_prefetched}
    group = fresh_ranks(3)
    (fit, lost), dead, (other, _) = group.attempt(
        fit_async, LONG, options, way, KILL_RANK_1, kind, fields
    )
    assert dead.cause is None
    assert len(lost) == 1 + num_prefetched
    num_trained = len(fit.reports) + len(other.reports) + 5  # rank 1 made five steps
    assert num_trained + len(lost) == LONG.order(3).num_steps * 3
    assert distance(fit, other) == 0
    assert [path.name for path in group.folder.iterdir() if path.name != "own-1"] == []


@on_one_host
def test_a_new_process_takes_a_dead_ones_place(fresh_ranks, tmp_path, kind, options):
    group, came = fresh_ranks(2), tmp_path / "came"
    group.begin(fit_async, LONG, options, "host", partial(wait_for_another, came), kind)
    group.processes[1].join(30)
    outside = group.start_outside(
        fit_async, 1, LONG, options, "host", partial(say_i_came, came), kind, {"joins": True}
    )
    (fit, lost), dead = group.end()
    joined, _ = outside.result()
    assert dead.cause is None
    assert len(joined.reports) > 5
    assert joined.reports[0].staleness is not None
    assert len(fit.reports) + len(joined.reports) + 5 + len(lost) == LONG.order(2).num_steps * 2
    assert distance(fit, joined) == 0
    assert list(group.folder.iterdir()) == []


def test_a_worker_that_joins_after_the_end_gets_an_error(ranks):
    late = ranks(2).start_outside(
        fit_async, 1, LONG, {}, "host", None, AsyncParameterServer, {"joins": True}
    )
    with pytest.raises(RankFailedError) as caught:
        late.result()
    assert isinstance(caught.value.cause, RunOverError)


@kinds
def test_the_death_of_rank_0_ends_the_run_with_a_sentence(fresh_ranks, way, kind, options):
    failures = fresh_ranks(2).attempt(
        fit_async, LONG, options, way, partial(strike, 0, 5, die), kind
    )
    assert failures[0].cause is None
    assert failures[1].cause.rank == 0


@kinds
def test_where_a_worker_raises_the_others_name_it(ranks, way, kind, options):
    group = ranks(3)
    first, second, third = group.attempt(
        fit_async, LONG, options, way, partial(strike, 1, 5, fail), kind
    )
    assert isinstance(second.cause, ZeroDivisionError)
    assert first.cause.rank == third.cause.rank == 1
    assert list(group.folder.iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"bound": 1}])
def test_a_silent_worker_is_given_up(ranks, options):
    problem, hasty = Problem(num_epochs=3, learning_rate=0.02), {**options, "timeout": 1.0}
    hangs = partial(strike, 1, 2, partial(time.sleep, 5))
    results = ranks(3).attempt(fit_async, problem, hasty, "host", hangs)
    (fit, lost), failure, (other, _) = results
    assert failure.cause.rank == 1
    assert len(lost) == 1
    assert distance(fit, other) == 0


def test_where_the_server_fails_rank_0_raises_its_error(ranks):
    first, second = ranks(2).attempt(
        fit_async, LONG, {}, "host", None, AsyncParameterServer, {"make_optimizer": broken}
    )
    assert isinstance(first.cause, ZeroDivisionError)
    assert second.cause.rank == 0


def strike(who: int, when: int, do: Callable[[], object], rank: int, step: int) -> None:
    """Before a rank's step of this number: do something to it; all others go on unhurried."""
    if (rank, step) == (who, when):
        do()
    unhurried(rank, step)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError


KILL_RANK_1 = partial(strike, 1, 5, die)


def wait_for_another(came: Path, rank: int, step: int) -> None:
    """Kill rank 1; hold rank 0 up until another process has taken its place."""
    if step == 20:
        wait_for(came)
    KILL_RANK_1(rank, step)


def say_i_came(came: Path, rank: int, step: int) -> None:
    came.touch()
    unhurried(rank, step)


def broken(parameters):
    """An optimizer with a hook that fails."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: fail())
    return optimizer
