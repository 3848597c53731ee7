"""Is the sum right where ranks are on several hosts, and does a death on one free all?

A host is a folder of its own here: ranks share memory where they share a folder.
"""

import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ddpnb.rank.cells import is_consequence
from ddpnb.rank.comm.rendezvous import CancellationToken, WorkerConfig, host_id
from ddpnb.rank.comm.shared_all_reduce import CHUNK_BYTES, HierarchicalAllReduce
from tests.rank.fit import Problem, by_hand, by_strategy, distance
from tests.rank.test_ddp import timed_job
from tests.rank.test_deaths import kill_rank_1
from tests.rank.test_shared_sum import whole_numbers

S = 4 * (6 * 16 + 16 + 16 * 3 + 3)
"""Bytes of the parameters of ``Problem``'s model: float32."""


def on_hosts(state, folder, sizes, job, *args):
    """Do a job on hosts with so many ranks each, laid out host by host."""
    number = [host for host, size in enumerate(sizes) for _ in range(size)][state.rank]
    own = folder / f"host-{number}"
    own.mkdir(exist_ok=True)
    result = job(state, own, *args)
    dist.barrier()
    if state.rank == sum(sizes[:number]):
        own.rmdir()
    return result


def fit(ranks, sizes, problem):
    return ranks(sum(sizes)).call(on_hosts, sizes, by_strategy, "ddp-shm", problem)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((2, 1), Problem(accumulate=2)),
        ((1, 2), Problem(optimizer="adam", model="frozen")),
        ((2, 2), Problem(optimizer="sgd", clip=0.3)),
        ((1, 3), Problem(model="mixed")),
        ((1, 2, 1), Problem(accumulate=2)),
    ],
)
def test_it_trains_like_ddp_and_one_process(ranks, sizes, problem):
    fits = fit(ranks, sizes, problem)
    ddp, *_ = ranks(sum(sizes)).call(by_strategy, "ddp", problem)
    assert all(distance(each, fits[0]) == 0 for each in fits)
    assert distance(fits[0], ddp) < 1e-6
    assert distance(fits[0], by_hand(problem, sum(sizes))) < 1e-5
    assert [len(each.reports) for each in fits] == [len(ddp.reports)] * sum(sizes)
    assert {each.num_files_left for each in fits} == {0}
    assert all(f"each of {len(sizes)} hosts" in each.notes[0] for each in fits)


def test_bytes_are_counted_within_hosts_and_between_them(ranks):
    def counted(sizes):
        fits = fit(ranks, sizes, Problem(num_epochs=0.5))
        steps = [{(r.num_bytes_sent, r.num_bytes_received) for r in each.reports} for each in fits]
        assert all(len(each) == 1 for each in steps)
        return [each.pop() for each in steps]

    leader, other = (3 * S, 2 * S), (S, 2 * S)
    assert counted((2, 2)) == [leader, other, leader, other]
    assert counted((2, 1)) == [leader, other, (S, S)]
    alone = 4 * S // 3
    assert counted((1, 2, 1)) == [(alone, alone), (2 * S + alone, S + alone), other, (alone, alone)]


def stress(state, folder, num_rounds):
    """Add tensors of one to many pieces, some late; return how many were wrong."""
    hosts = [""] * state.world_size
    dist.all_gather_object(hosts, host_id(folder))
    config = WorkerConfig(
        rank=state.rank,
        world_size=state.world_size,
        folder=folder,
        name="test",
        timeout_seconds=30.0,
        cancellation=CancellationToken(),
    )
    num_wrong = 0
    with closing(HierarchicalAllReduce(config, hosts)) as shared:
        for number in range(num_rounds):
            size = (number % 7) * CHUNK_BYTES // 5 + 1 + number % 3
            if (number + state.rank) % 5 == 0:
                time.sleep(0.002)
            flat = whole_numbers(state.rank, number, size, torch.float32)
            shared.all_reduce(flat)
            everyone = range(state.world_size)
            expected = sum(whole_numbers(rank, number, size, torch.float32) for rank in everyone)
            num_wrong += not torch.equal(flat, expected)
    return num_wrong


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_tensors_of_many_pieces_are_right(ranks, sizes):
    assert ranks(sum(sizes)).call(on_hosts, sizes, stress, 14) == [0] * sum(sizes)


def test_what_lies_between_hosts_is_communication(ranks):
    for timings in ranks(3).call(on_hosts, (2, 1), timed_job, "ddp-shm", 4):
        assert all(parts.communication > 0 and parts.hidden == 0 for _, parts in timings)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_where_a_rank_dies_the_ranks_of_all_hosts_fail_at_once(fresh_ranks, sizes):
    """Rank 1 is led by rank 0, or it leads the second host."""
    started, problem = time.monotonic(), replace(Problem(), num_epochs=50)
    first, _, third = fresh_ranks(3).attempt(
        on_hosts, sizes, by_strategy, "ddp-shm", problem, kill_rank_1
    )
    assert time.monotonic() - started < 20
    assert is_consequence(first.cause)
    assert is_consequence(third.cause)
