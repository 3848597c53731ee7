"""Do simulated exchanges take what the formulas say, and these what the emulated link takes?"""

import math

import pytest

from ddpnb.protocol.notation import parse_link
from ddpnb.rank.collectives import table as emulated
from ddpnb.scaling import links
from ddpnb.scaling.simulate import (
    Bucket,
    expected_max,
    on_cores,
    overlapped,
    ring_all_reduce,
    server_bound,
    server_rate,
)

LINK = parse_link("1Gbit,0.5ms")
SIZE = 3_000_000


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 16])
def test_a_simulated_ring_takes_what_its_formula_says(num_ranks):
    ends = ring_all_reduce(LINK, SIZE, [0.0] * num_ranks)
    assert ends == pytest.approx([links.ring(LINK, SIZE, num_ranks)] * num_ranks)


def test_a_late_rank_delays_the_ring_and_its_lateness_is_no_longer_than_it_is():
    late = ring_all_reduce(LINK, SIZE, [0.0, 0.0, 0.1, 0.0])
    together = links.ring(LINK, SIZE, 4)
    assert min(late) > together
    assert max(late) <= 0.1 + together + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_emulated_link_has_the_same_formulas(num_ranks):
    assert emulated.all_reduce(SIZE, num_ranks).seconds(LINK) == pytest.approx(
        links.ring(LINK, SIZE, num_ranks)
    )
    assert emulated.ring(SIZE / num_ranks, num_ranks).seconds(LINK) == pytest.approx(
        links.around(LINK, SIZE, num_ranks)
    )
    assert emulated.tree(SIZE, num_ranks).seconds(LINK) == pytest.approx(
        links.broadcast(LINK, SIZE, num_ranks)
    )


@pytest.mark.parametrize("num_workers", [1, 2, 5, 8, 9, 16, 64])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("update", [0.0, 2e-3, 40e-3])
def test_a_simulated_server_takes_as_many_gradients_as_its_formula_says(
    num_workers, num_shards, update
):
    compute, size = 0.1, 1_000_000
    simulated = server_rate(
        LINK, size, [compute] * num_workers, update=update, num_shards=num_shards
    )
    formula = server_bound(LINK, size, compute, num_workers, update=update, num_shards=num_shards)
    assert simulated == pytest.approx(formula, rel=0.02)


def test_a_server_that_is_saturated_gains_from_shards_and_not_from_workers():
    one, more = (server_bound(LINK, SIZE, 0.05, num) for num in (64, 128))
    assert one == more
    assert server_bound(LINK, SIZE, 0.05, 128, num_shards=2) == pytest.approx(2 * one)


def test_a_server_does_not_wait_for_a_straggler():
    exchange = 2 * links.message(LINK, 1000)
    rate = server_rate(LINK, 1000, [0.1, 0.1, 0.1, 0.4], num_steps=90)
    assert rate == pytest.approx(3 / (0.1 + exchange) + 1 / (0.4 + exchange), rel=0.03)


def test_buckets_use_one_link_in_turn_and_hide_behind_the_backward_pass():
    def seconds(num_bytes: float) -> float:
        return num_bytes * 1e-6

    backward = 0.1
    assert overlapped(backward, [Bucket(10_000, 0.5)], seconds) == backward  # hidden
    assert overlapped(backward, [Bucket(10_000, 1.0)], seconds) == pytest.approx(0.11)
    # the second waits for the first: ready at 0.05, ends at 0.13, then 0.02 more
    both = [Bucket(80_000, 0.5), Bucket(20_000, 1.0)]
    assert overlapped(backward, both, seconds) == pytest.approx(0.15)


def test_ranks_take_turns_on_cores():
    assert on_cores(0.01, 2, 2) == 0.01
    assert on_cores(0.3, 3, 2) == pytest.approx(0.45)  # long work is shared evenly
    assert on_cores(0.001, 3, 2) == pytest.approx(0.002)  # short work is not cut
    assert on_cores(0.01, 4, 2) == pytest.approx(0.02)


def test_the_slowest_of_several_is_as_slow_as_order_statistics_say():
    assert expected_max(1) == 0
    assert expected_max(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-4)
    assert expected_max(100) == pytest.approx(2.5076, rel=1e-3)  # tables of normal scores
    assert expected_max(1000) == pytest.approx(3.2414, rel=1e-3)
    assert expected_max(4, "exponential") == pytest.approx(1 / 2 + 1 / 3 + 1 / 4)


def test_other_all_reduces():
    assert links.tree(LINK, SIZE, 8) == pytest.approx(6 * (0.5e-3 + SIZE * 8e-9))
    assert links.recursive_doubling(LINK, SIZE, 8) == pytest.approx(links.tree(LINK, SIZE, 8) / 2)
    small, large = 100, 100_000_000
    assert links.best(LINK, small, 64) == links.double_tree(LINK, small, 64)
    assert links.double_tree(LINK, small, 64) < links.ring(LINK, small, 64) / 5
    assert links.best(LINK, large, 64) == pytest.approx(links.ring(LINK, large, 64), rel=0.05)


def test_hosts_of_several_ranks_send_less_between_them():
    inside = links.PRESETS["NVLink-V100"]
    flat = links.Network(link=LINK)
    grouped = links.Network(link=LINK, inside=inside, ranks_per_host=8)
    assert grouped.all_reduce(SIZE, 8) == links.ring(inside, SIZE, 8)
    between = links.ring(LINK, SIZE, 2)
    assert between < grouped.all_reduce(SIZE, 16) < 1.05 * between < flat.all_reduce(SIZE, 16)
