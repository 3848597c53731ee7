"""Does a strategy report the bytes of its formula, and those that torch recorded?"""

import json
import math
import time
from dataclasses import replace
from fractions import Fraction

import pytest
from torch._C._distributed_c10d import _dump_fr_trace_json

from tests.rank.fit import Problem, by_strategy

PROBLEM = Problem(num_epochs=2)
S = 4 * (6 * 16 + 16 + 16 * 3 + 3)
"""Bytes of the parameters of PROBLEM's model: float32."""


def all_reduced(num_ranks: int) -> int:
    return int(Fraction(2 * (num_ranks - 1), num_ranks) * S)


def sent(ranks, word: str, num_ranks: int) -> list[list[int]]:
    fits = ranks(num_ranks).call(by_strategy, word, PROBLEM)
    return [[report.traffic.sent for report in fit.reports] for fit in fits]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("word", ["ddp", "ddp-by-hand", "ddp-overlap-by-hand"])
def test_an_all_reduce_of_all_gradients(ranks, word, num_ranks):
    """But for its second step, in which DDP also broadcasts the order of its buckets."""
    for found in sent(ranks, word, num_ranks):
        assert len(found) == PROBLEM.order(num_ranks).num_steps
        assert {*found[:1], *found[2:]} == {all_reduced(num_ranks)}
        assert found[1] - all_reduced(num_ranks) in ((0, 24, 48) if word == "ddp" else (0,))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_ring_sends_as_little_as_there_is_to_send(ranks, num_ranks):
    found = sent(ranks, "ring-by-hand", num_ranks)
    per_step = [sum(step) for step in zip(*found, strict=True)]
    assert per_step == [2 * (num_ranks - 1) * S] * PROBLEM.order(num_ranks).num_steps
    largest_chunk = 4 * -(-S // 4 // num_ranks)
    assert max(map(max, found)) <= 2 * (num_ranks - 1) * largest_chunk


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_central_store_hears_from_each_and_sends_to_each(ranks, num_ranks):
    first, *others = sent(ranks, "central", num_ranks)
    assert set(first) == {(num_ranks - 1).bit_length() * S}  # gloo passes it on along a tree
    assert [set(other) for other in others] == [{S}] * (num_ranks - 1)


def received(ranks, word: str, num_ranks: int) -> list[set[int]]:
    fits = ranks(num_ranks).call(by_strategy, word, PROBLEM)
    return [{report.traffic.received for report in fit.reports} for fit in fits]


def test_replicas_get_parameters_and_give_gradients(ranks):
    first, *_ = sent(ranks, "dp", 3)
    assert set(first) == {2 * S}
    assert received(ranks, "dp", 3)[0] == {2 * S}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_comes_back_is_counted_too(ranks, num_ranks):
    assert received(ranks, "ddp-by-hand", num_ranks) == [{all_reduced(num_ranks)}] * num_ranks
    for word in ("async", "hogwild"):
        assert set.union(*received(ranks, word, num_ranks)) == {S}
    first, *others = received(ranks, "central", num_ranks)
    assert (first, others) == ({(num_ranks - 1) * S}, [{S}] * (num_ranks - 1))


@pytest.mark.parametrize("word", ["ddp", "central", "zero", "ring-by-hand", "dp", "fsdp"])
def test_ranks_together_receive_what_they_send(ranks, word):
    fits = ranks(3).call(by_strategy, word, PROBLEM)
    reports = [report for fit in fits for report in fit.reports]
    num_sent = sum(report.traffic.sent for report in reports)
    assert sum(report.traffic.received for report in reports) == num_sent > 0


@pytest.mark.parametrize(("word", "parameters", "state"), [("async", 2 * S, S), ("hogwild", S, S)])
def test_memory_held_by_asynchronous_workers_is_known(ranks, word, parameters, state):
    """Rank 0 serves: it holds a copy for each worker, and the only optimizer of ``async``."""
    first, second = (fit.memory for fit in ranks(2).call(by_strategy, word, PROBLEM))
    assert (first.parameters, first.optimizer) == (parameters, state)
    assert (second.parameters, second.optimizer) == (S, 0 if word == "async" else S)


@pytest.mark.parametrize("word", ["single", "no-comm"])
def test_a_rank_that_trains_alone_sends_nothing(ranks, word):
    assert set(sent(ranks, word, 2)[0]) == {0}


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_meeting_every_few_steps_sends_as_many_times_less(ranks, name):
    num_steps = PROBLEM.order(2).num_steps
    assert num_steps % 7 == 0
    found = sent(ranks, f"{name}:every=7", 2)
    expected = [S if (step + 1) % 7 == 0 else 0 for step in range(num_steps)]
    assert found == [expected, expected]
    assert 7 * sum(expected) == sum(sent(ranks, "ddp-by-hand", 2)[0])


def test_gossip_in_pairs_sends_all_to_one(ranks):
    assert set(sent(ranks, "gossip", 2)[0]) == {S}
    found = sent(ranks, "gossip", 3)
    assert [sum(step) for step in zip(*found, strict=True)] == [2 * S] * len(found[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_locks_each_update_is_written_to_the_memory_of_all(ranks, num_ranks):
    found = sent(ranks, "hogwild", num_ranks)
    assert {size for rank in found for size in rank} == {S}
    assert sum(map(len, found)) == PROBLEM.order(num_ranks).num_steps * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_in_shared_memory_gradients_are_written_once(ranks, num_ranks):
    """But for the second step, in which DDP also broadcasts the order of its buckets."""
    expected = S if num_ranks > 1 else 0
    for first, _, *others in sent(ranks, "ddp-shm", num_ranks):
        assert {first, *others} == {expected}


EXCHANGES = [
    "ddp",
    "ddp-by-hand",
    "ddp-overlap-by-hand",
    "central",
    "local-sgd:every=2",
    "local-sgd:after=9",
    "zero",
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("word", EXCHANGES)
def test_reported_bytes_are_those_that_torch_has_recorded(ranks, word, num_ranks):
    """Of the last four of eight steps: what setting up and finishing take is left out."""
    few, many = (ranks(num_ranks).call(reported_and_recorded, word, num) for num in (4, 8))
    reported = [long - short for (short, _), (long, _) in zip(few, many, strict=True)]
    recorded = {long - short for (_, short), (_, long) in zip(few, many, strict=True)}
    assert len(recorded) == 1  # every rank makes every call
    assert sum(reported) == pytest.approx(
        recorded.pop(), abs=4 * num_ranks
    )  # each reports whole bytes
    assert sum(reported) > 0


def reported_and_recorded(state, folder, word: str, num_steps: int) -> tuple[int, int]:
    """What a rank says that it sent, and what all ranks send for its calls."""
    problem = replace(PROBLEM, num_epochs=num_steps / 7)
    since = time.time_ns()
    fit = by_strategy(state, folder, word, problem)
    assert len(fit.reports) == num_steps
    entries = json.loads(_dump_fr_trace_json())["entries"]
    recorded = [sent_for(e, state.world_size) for e in entries if e["time_created_ns"] > since]
    return sum(report.traffic.sent for report in fit.reports), sum(recorded)


def sent_for(entry, num_ranks: int) -> int:
    """Bytes that all ranks together send for one call."""
    size = (
        math.prod(entry["input_sizes"][0])
        * {"Float": 4, "Long": 8, "Int": 4}[entry["input_dtypes"][0]]
    )
    times = {"all_reduce": 2, "reduce": 1, "broadcast": 1, "all_gather": num_ranks}
    return times[entry["profiling_name"].removeprefix("gloo:")] * (num_ranks - 1) * size
