"""Is lock-free training on shared memory exact where it can be, and honest about staleness?"""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.comm.parameter_store import ParameterAccess
from ddpnb.rank.comm.rendezvous import CancellationToken, RankLostError, WorkerConfig
from ddpnb.rank.comm.work_queue import WorkQueue
from ddpnb.rank.strategies.hogwild import Hogwild
from tests.rank.fit import Fit, Problem, distance, drive, optimum
from tests.rank.hold import hold_rank_1, wait_for
from tests.rank.ranks import make_state
from tests.rank.test_deaths import (
    LONG,
    hang,
    say_i_came,
    unhurried,
    wait_for_another,
)

CALM = Problem(num_epochs=10, learning_rate=0.02)


def fit_hogwild(
    state,
    folder,
    problem,
    before_step=None,
    timeout_seconds=60.0,
    joins=False,
    num_prefetched=0,
    ended=None,
):
    log: list[ParameterAccess] = []
    strategy = Hogwild(timeout=timeout_seconds, log=log.append)
    try:
        fields = {"joins": joins, "num_prefetched": num_prefetched}
        fit: Fit = drive(strategy, state, folder, problem, before_step, **fields)
        if ended is not None:
            ended.touch()
        return replace(fit, log=log), strategy.lost_shards()
    finally:
        strategy.close()
        strategy.close()


@dataclass(frozen=True, kw_only=True)
class OverlapProblem(Problem):
    """Rank 0 makes an update while rank 1 is in its third forward pass."""

    folder: Path

    def build(self) -> nn.Module:
        model, calls = super().build(), itertools.count()

        def before_forward(*_: object) -> None:
            if dist.get_rank() == 1 and next(calls) == 2:
                (self.folder / "computing").touch()
                wait_for(self.folder / "updated")

        model.register_forward_pre_hook(before_forward)
        return model

    def before_step(self, rank: int, step: int) -> None:
        """Before each step."""
        if rank == 0 and step == 3:
            wait_for(self.folder / "computing")
        if rank == 0 and step == 4:
            (self.folder / "updated").touch()
        if rank == 2 and step == 3:
            wait_for(self.folder / "updated")


def test_staleness_is_what_the_logs_of_all_workers_say(ranks, tmp_path):
    problem = OverlapProblem(num_epochs=10, learning_rate=0.02, folder=tmp_path)
    fits = [fit for fit, _ in ranks(3).call(fit_hogwild, problem, problem.before_step)]
    writes = {access.version: rank for rank, fit in enumerate(fits) for access in writes_in(fit)}
    assert sum(len(writes_in(fit)) for fit in fits) == len(writes)  # each has its own number
    assert sorted(writes) == list(range(1, problem.order(3).num_steps * 3 + 1))
    for rank, fit in enumerate(fits):
        pairs = zip(fit.log[::2], fit.log[1::2], strict=True)
        assert all(write.is_write and not read.is_write for read, write in pairs)
        pairs = zip(fit.log[::2], fit.log[1::2], strict=True)
        by_others = [
            sum(writes[number] != rank for number in range(read.version + 1, write.version))
            for read, write in pairs
        ]
        assert [report.staleness for report in fit.reports] == by_others
    assert fits[1].reports[2].staleness > 0
    assert list(ranks(3).folder.iterdir()) == []


def writes_in(fit: Fit) -> list[ParameterAccess]:
    return [access for access in fit.log if access.is_write]


def test_all_ranks_end_with_the_same_parameters_in_memory_of_their_own(ranks):
    fits = [fit for fit, _ in ranks(3).call(fit_hogwild, CALM)]
    assert all(distance(fit, fits[0]) == 0 for fit in fits)


def test_it_finds_the_known_optimum_of_a_convex_problem(ranks):
    problem = Problem(model="linear", learning_rate=0.1, num_epochs=90, batch_size=16)
    (fit, _), _ = ranks(2).call(fit_hogwild, problem, unhurried)  # none finishes alone
    torch.testing.assert_close(tuple(fit.parameters), optimum(problem), atol=1e-3, rtol=0)


def test_a_slow_worker_delays_no_other(ranks, tmp_path):
    hold = partial(hold_rank_1, tmp_path / "sign", 110)
    (fast, _), (slow, _) = ranks(2).call(fit_hogwild, CALM, hold)
    assert len(fast.reports) >= 110 > 3 * len(slow.reports)


def test_a_new_process_takes_a_dead_ones_place(fresh_ranks, tmp_path):
    group, came = fresh_ranks(2), tmp_path / "came"
    group.begin(fit_hogwild, LONG, partial(wait_for_another, came))
    group.processes[1].join(30)
    outside = group.start_outside(fit_hogwild, 1, LONG, partial(say_i_came, came), 60.0, True)
    (fit, lost), _ = group.end()
    joined, _ = outside.result()
    assert len(joined.reports) > 5
    assert len(fit.reports) + len(joined.reports) + 5 + len(lost) == LONG.order(2).num_steps * 2
    assert distance(fit, joined) == 0


def test_a_silent_worker_is_given_up(ranks, tmp_path):
    sign = tmp_path / "sign"
    (fit, lost), second, (other, _) = ranks(3).attempt(
        fit_hogwild, CALM, partial(hang, sign), 5.0, False, 0, sign
    )
    assert isinstance(second.cause, RankLostError)
    assert len(lost) == 1
    assert distance(fit, other) == 0


def test_gpus_are_refused_with_a_sentence():
    state = replace(make_state(0, 2), device="cuda:0")
    with pytest.raises(UserError, match="needs ranks on CPUs"):
        Hogwild().plan(state)


@pytest.mark.parametrize("transport", ["gloo", "rpc"])
def test_another_transport_is_refused_before_anything_trains(transport):
    with pytest.raises(UserError, match=f"hogwild trains in shared memory, not by {transport}"):
        RunSpec(run_id="r", strategy="hogwild", task="digits", transport=transport)


def test_the_queue_hands_out_each_shard_once_and_knows_the_lost(tmp_path):
    configs = [
        WorkerConfig(
            rank=rank,
            world_size=2,
            folder=tmp_path,
            name="test",
            timeout_seconds=1,
            cancellation=CancellationToken(),
        )
        for rank in range(2)
    ]
    WorkQueue.create(configs[0], num_shards=3)
    one, other = (WorkQueue(config, num_shards=3) for config in configs)
    assert [one.take_shard(), other.take_shard(), one.take_shard(), other.take_shard()] == [
        0,
        1,
        2,
        None,
    ]
    other.finish_shard()
    assert one.lost_shards() == [0, 2]
    assert [one.count_update(), other.count_update(), one.num_updates] == [1, 2, 2]
    for queue in (one, other, one):
        queue.close()
