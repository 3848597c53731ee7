"""Are the bytes that a strategy tells of those of the formula?"""

from fractions import Fraction

import pytest

from tests.rank.fit import Problem, by_strategy

PROBLEM = Problem(num_epochs=2)
S = 4 * (6 * 16 + 16 + 16 * 3 + 3)
"""Bytes of the parameters of PROBLEM's model: float32."""


def all_reduced(num_ranks: int) -> int:
    return int(Fraction(2 * (num_ranks - 1), num_ranks) * S)


def sent(ranks, word: str, num_ranks: int) -> list[list[int]]:
    fits = ranks(num_ranks).call(by_strategy, word, PROBLEM)
    return [[report.num_bytes_sent for report in fit.reports] for fit in fits]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("word", ["ddp", "ddp-by-hand"])
def test_an_all_reduce_of_all_gradients(ranks, word, num_ranks):
    num_steps = PROBLEM.order(num_ranks).num_steps
    assert sent(ranks, word, num_ranks) == [[all_reduced(num_ranks)] * num_steps] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_ring_sends_as_little_as_there_is_to_send(ranks, num_ranks):
    found = sent(ranks, "ring-by-hand", num_ranks)
    per_step = [sum(step) for step in zip(*found, strict=True)]
    assert per_step == [2 * (num_ranks - 1) * S] * PROBLEM.order(num_ranks).num_steps
    largest_chunk = 4 * -(-S // 4 // num_ranks)
    assert max(map(max, found)) <= 2 * (num_ranks - 1) * largest_chunk


def test_a_central_store_is_told_by_each_and_tells_each(ranks):
    first, *others = sent(ranks, "central", 3)
    assert set(first) == {2 * S}
    assert all(set(other) == {S} for other in others)


def test_replicas_get_parameters_and_give_gradients(ranks):
    first, *_ = sent(ranks, "dp", 3)
    assert set(first) == {2 * 2 * S}


@pytest.mark.parametrize("word", ["single", "no-comm"])
def test_who_trains_alone_sends_nothing(ranks, word):
    assert set(sent(ranks, word, 2)[0]) == {0}


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_meeting_every_few_steps_sends_as_many_times_less(ranks, name):
    num_steps = PROBLEM.order(2).num_steps
    assert num_steps % 7 == 0
    found = sent(ranks, f"{name}:every=7", 2)
    expected = [S if (step + 1) % 7 == 0 else 0 for step in range(num_steps)]
    assert found == [expected, expected]
    assert 7 * sum(expected) == sum(sent(ranks, "ddp", 2)[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gossip_writes_all_to_one(ranks, num_ranks):
    expected = S if num_ranks > 1 else 0
    assert {size for rank in sent(ranks, "gossip", num_ranks) for size in rank} == {expected}


def test_gossip_in_pairs_sends_all_to_one(ranks):
    assert set(sent(ranks, "gossip:together=on", 2)[0]) == {S}
    found = sent(ranks, "gossip:together=on", 3)
    assert [sum(step) for step in zip(*found, strict=True)] == [2 * S] * len(found[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_in_shared_memory_gradients_are_written_once(ranks, num_ranks):
    expected = S if num_ranks > 1 else 0
    assert {size for rank in sent(ranks, "ddp-shm", num_ranks) for size in rank} == {expected}
