"""Are ranks waited for as long as on emulated devices, and as theory says?"""

import math

import pytest

from ddpnb.protocol.devices import Compute
from ddpnb.protocol.notation import parse_link
from ddpnb.rank.laboratory.order import VirtualOrder
from ddpnb.rank.laboratory.times import ComputeTimes
from ddpnb.scaling.waiting import expected_max, on_cores, server_bound

LINK = parse_link("1Gbit,0.5ms")
SIZE = 3_000_000
COMPUTE = 0.1


def served(num_workers: int) -> float:
    """Return the gradients a second of the server of emulated devices."""
    order = VirtualOrder(
        ComputeTimes(compute=Compute(COMPUTE)),
        num_workers=num_workers,
        link=lambda _: LINK,
        num_bytes=SIZE,
        num_samples=lambda _: 1,
    )
    for rank in range(num_workers):
        order.reply(rank, rank, is_first=True)
    times = []
    for _ in range(60 * num_workers):
        (rank,) = [rank for rank in range(num_workers) if order.is_next(rank)]
        order.arrive(rank)
        times.append(order.now)
        order.reply(rank, 0)
    first = len(times) // 3
    return (len(times) - 1 - first) / (times[-1] - times[first])


@pytest.mark.parametrize("num_workers", [2, 3, 5, 8, 16, 48])
def test_a_server_takes_as_many_gradients_as_its_formula_says(num_workers):
    formula = 1 / COMPUTE + server_bound(LINK, SIZE, COMPUTE, num_workers - 1)  # rank 0: no link
    assert served(num_workers) == pytest.approx(formula, rel=0.03)


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
