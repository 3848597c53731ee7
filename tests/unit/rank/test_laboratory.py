"""The virtual clock agrees with closed forms, without any rank."""

from itertools import pairwise

import pytest
import torch

from ddpnb.protocol.devices import Compute, Devices, parse_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import LinkSpec, parse_link, parse_slow
from ddpnb.rank.collectives.table import METHODS, NO_ROOT, Call
from ddpnb.rank.laboratory.clock import VirtualClock
from ddpnb.rank.laboratory.exchanges import Exchanges
from ddpnb.rank.laboratory.order import VirtualOrder
from ddpnb.rank.laboratory.times import ComputeTimes
from ddpnb.rank.meter import Meter

LINK = LinkSpec(bits_per_second=8e9, latency_seconds=30e-6)  # 1 GB/s
TIMES = ComputeTimes(seconds_per_sample=1e-3, seconds_per_pass=2e-3)
SIZE = 4 * 1_000_000


class Group:
    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._size, self.group_name = rank, num_ranks, "0"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Rank:
    """A rank's clock, and its calls as the interceptor makes them known."""

    def __init__(self, folder, rank: int, num_ranks: int, times: ComputeTimes = TIMES) -> None:
        self.group = Group(rank, num_ranks)
        self.clock = VirtualClock(times, range(rank, rank + 1), usual_bytes=SIZE)
        devices = Devices(num=num_ranks, device_link=LINK)
        self.exchanges = Exchanges(
            self.clock, Meter(self.clock), devices, folder / "run", check=lambda: None
        )
        self.clock.start()

    def compute(self, num_samples: int) -> None:
        self.clock.begin_step(num_samples)
        self.clock.compute("forward", num_samples)
        self.clock.compute("backward", num_samples)

    def begin(self, name: str, num_floats: int, peer: int | None = None, **how: bool) -> Call:
        arguments = [torch.empty(num_floats)], *([] if peer is None else [peer])
        call = Call(METHODS[name], self.group, arguments, NO_ROOT, is_blocking=False, **how)
        self.exchanges.begin(call)
        return call

    def wait(self, call: Call) -> None:
        with self.exchanges.waiting(call):
            pass


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_an_all_reduce_after_the_backward_pass_is_a_ring(tmp_path, num_ranks):
    ranks = [Rank(tmp_path, rank, num_ranks) for rank in range(num_ranks)]
    calls = []
    for each in ranks:
        each.compute(16)
        each.clock.computed()
        calls.append(each.begin("allreduce", SIZE // 4))
    for each, call in zip(ranks, calls, strict=True):
        each.wait(call)
    ring = 2 * (num_ranks - 1) * (30e-6 + SIZE / num_ranks / 1e9)
    assert [each.clock.now for each in ranks] == [pytest.approx(16e-3 + 2e-3 + ring)] * num_ranks


def test_buckets_are_sent_while_the_backward_pass_goes_on(tmp_path):
    """Two buckets: the first is hidden behind the second half of the backward pass."""
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    for each in ranks:
        each.compute(16)
        for _ in range(2):
            each.begin("allreduce", SIZE // 8, is_in_cpp=True)
    for each in ranks:
        each.clock.computed()
    bucket = 2 * (30e-6 + SIZE / 4 / 1e9)
    assert [each.clock.now for each in ranks] == [pytest.approx(18e-3 + bucket)] * 2


def test_all_wait_for_the_slowest(tmp_path):
    slow = ComputeTimes(seconds_per_sample=1e-3, slow=tuple(map(parse_slow, ("1:3x", "1:5ms"))))
    ranks = [Rank(tmp_path, rank, 2, slow) for rank in range(2)]
    calls = []
    for each in ranks:
        each.compute(10)
        each.clock.computed()
        calls.append(each.begin("allreduce", 1))
    for each, call in zip(ranks, calls, strict=True):
        each.wait(call)
    assert ranks[0].clock.now == ranks[1].clock.now == pytest.approx(35e-3, rel=0.01)


def test_messages_around_a_ring_leave_and_arrive_at_once(tmp_path):
    num_ranks, part = 4, SIZE // 16
    ranks = [Rank(tmp_path, rank, num_ranks) for rank in range(num_ranks)]
    for _ in range(3):
        calls = []
        for number, each in enumerate(ranks):
            calls.append(
                (
                    each.begin("send", part, (number + 1) % num_ranks),
                    each.begin("recv", part, (number - 1) % num_ranks),
                )
            )
        for each, both in zip(ranks, calls, strict=True):
            for call in both:
                each.wait(call)
    assert ranks[0].clock.now == pytest.approx(3 * (30e-6 + 4 * part / 1e9))


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
    slow = ComputeTimes(seconds_per_sample=1e-3, slow=(parse_slow("1:4x"),))
    took = [sum(rank == each for rank, _ in served(4, 400, slow)) for each in range(4)]
    assert took[0] / took[1] == pytest.approx(4, rel=0.25)
    assert served(4, 100, slow) == served(4, 100, slow)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0", "1 to"),
        ("0xV100", "1 to"),
        ("8xV10", "'V10'"),
        ("9xV100/2", "2 hosts"),
        ("eight", "a number"),
    ],
)
def test_devices_that_are_none_are_refused(text, named):
    with pytest.raises(UserError, match=named):
        parse_devices(text, model="resnet50" if "V100" in text else "")


def test_a_card_needs_a_model_that_has_figures_on_it():
    assert parse_devices("8xV100", model="resnet50").compute == Compute(2.74e-3, 9.3e-3)
    assert parse_devices("4xT4", compute="0.4ms/sample,2ms").compute == Compute(0.4e-3, 2e-3)
    for choices in ({}, {"model": "resnet5"}, {"model": "gpt2-small"}, {"compute": "4"}):
        with pytest.raises(UserError):
            parse_devices("8xV100", **choices)
    with pytest.raises(UserError, match="needs a card"):
        parse_devices("8", model="resnet50")


def test_a_ring_of_two_hosts_is_as_slow_as_the_link_between():
    devices = parse_devices("16xV100/2", model="resnet50", link="25Gbit,30us")
    assert devices.link_between(range(8)).bits_per_second == 960e9
    assert devices.link_between(range(16)) == parse_link("25Gbit,30us")
