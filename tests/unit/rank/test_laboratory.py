"""The virtual order of a server agrees with closed forms; devices are parsed."""

from itertools import pairwise

import pytest

from ddpnb.protocol.devices import Compute, parse_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec, parse_link, parse_slow
from ddpnb.rank.laboratory.order import VirtualOrder
from ddpnb.rank.laboratory.times import ComputeTimes

LINK = LinkSpec(bits_per_second=8e9, latency_seconds=30e-6)  # 1 GB/s
TIMES = ComputeTimes(compute=Compute(1e-3, 2e-3))
SIZE = 4 * 1_000_000


def served(num_workers: int, num_shards: int, times: ComputeTimes = TIMES) -> list[tuple]:
    """Serve shards of 16 samples; return the worker and the time of each arrival."""
    order = VirtualOrder(
        times,
        num_workers=num_workers,
        link=lambda _: LINK,
        num_bytes=SIZE,
        num_samples=lambda _: 16,
    )
    found: list[tuple[int, float]] = []
    for rank in range(num_workers):
        order.reply(rank, rank, is_first=True)
    for number in range(num_workers, num_shards):
        (rank,) = [rank for rank in range(num_workers) if order.is_next(rank)]
        order.arrive(rank)
        found.append((rank, order.now))
        order.reply(rank, number)
    return found


def test_one_server_saturates_where_its_link_is_full():
    few, many = (served(num, 400) for num in (2, 32))
    arrivals = [arrived for rank, arrived in many[100:] if rank > 0]  # rank 0 needs no link
    transfer = SIZE / 1e9
    assert all(b - a == pytest.approx(transfer) for a, b in pairwise(arrivals))
    rate = len(few) / few[-1][1]
    one = 16e-3 + 2e-3
    assert rate == pytest.approx(1 / one + 1 / (one + 2 * (transfer + 30e-6)), rel=0.02)


def test_a_slow_worker_takes_fewer_shards():
    slow = ComputeTimes(compute=Compute(1e-3), slow=(parse_slow("1:4x"),))
    took = [sum(rank == each for rank, _ in served(4, 400, slow)) for each in range(4)]
    assert took[0] / took[1] == pytest.approx(4, rel=0.25)
    assert served(4, 100, slow) == served(4, 100, slow)


def test_a_card_needs_a_model_that_has_figures_on_it():
    assert parse_devices("8xV100", model="resnet50").compute == Compute(2.74e-3, 9.3e-3)
    assert parse_devices("4xT4", compute="0.4ms/sample,2ms").compute == Compute(0.4e-3, 2e-3)
    for choices in ({}, {"model": "gpt2-small"}, {"compute": "4"}):
        with pytest.raises(UserError):
            parse_devices("8xV100", **choices)


def test_a_ring_of_two_hosts_is_as_slow_as_the_link_between():
    devices = parse_devices("16xV100/2", model="resnet50", link="25Gbit,30us")
    assert devices.link_between(range(8)).bits_per_second == 960e9
    assert devices.link_between(range(16)) == parse_link("25Gbit,30us")
