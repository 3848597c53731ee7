"""The virtual order of a server agrees with formulas, and devices are parsed."""

import random
import time

import pytest

from ddpnb.prediction.waiting import server_bound
from ddpnb.protocol.devices import Compute, Devices, parse_compute, parse_devices
from ddpnb.protocol.notation import parse_link, parse_slow
from ddpnb.rank.emulation import ComputeTimes, Emulation, measured
from ddpnb.rank.emulation.order import VirtualOrder

LINK = parse_link("1Gbit,0.5ms")
SIZE = 3_000_000


def served(num_workers: int, num_shards: int, times: ComputeTimes) -> list[tuple[int, float]]:
    """Serve shards of one sample, and return the worker and the time of each arrival."""
    devices = Devices(num=num_workers, device_link=LINK)
    emulation = Emulation(devices=devices, times=times, num_bytes=SIZE, num_in_shard=lambda _: 1)
    order = VirtualOrder(emulation, num_workers=num_workers, shard=lambda number: number)
    found: list[tuple[int, float]] = []
    for rank in range(num_workers):
        order.reply(rank, rank, is_first=True)
    for number in range(num_workers, num_shards):
        (rank,) = [rank for rank in range(num_workers) if order.is_next(rank)]
        order.arrive(rank)
        found.append((rank, order.now))
        order.reply(rank, number)
    return found


@pytest.mark.parametrize("num_workers", [2, 3, 16])
def test_a_server_takes_as_many_gradients_as_its_formula_says(num_workers):
    found = served(num_workers, 60 * num_workers, ComputeTimes(compute=Compute(0.1)))
    (_, begin), *rest = found[len(found) // 3 :]
    formula = 1 / 0.1 + server_bound(LINK, SIZE, 0.1, num_workers - 1)  # rank 0 needs no link
    assert len(rest) / (rest[-1][1] - begin) == pytest.approx(formula, rel=0.03)


def test_a_slow_worker_takes_fewer_shards():
    slow = ComputeTimes(compute=Compute(0.1), slow=parse_slow(["1:4x"]))
    took = [sum(rank == each for rank, _ in served(4, 400, slow)) for each in range(4)]
    assert took[0] / took[1] == pytest.approx(4, rel=0.25)
    assert served(4, 100, slow) == served(4, 100, slow)


def test_a_ring_of_two_hosts_is_as_slow_as_the_link_between():
    devices = parse_devices("16xV100/2", model="resnet50", link="25Gbit,30us")
    assert devices.link_between(range(8)).bits_per_second == 960e9
    assert devices.link_between(range(16)) == parse_link("25Gbit,30us")


@pytest.mark.parametrize("seed", range(30))
def test_a_measured_device_is_fitted_at_both_sizes(seed):
    draw = random.Random(seed)
    few = draw.choice([1, 2, 5, 32, 100])
    many = few * draw.choice([1, 2, 3, 8, 64])
    fixed = draw.choice([0.0, 10 ** draw.uniform(-4, 0)])
    true = Compute(10 ** draw.uniform(-6, -2), fixed)
    noise = draw.choice([0.0, 0.05])
    seconds = {num: true.of(num) * (1 + draw.uniform(0, noise)) for num in (few, many)}
    found = Compute.fitted(seconds)
    assert found.per_sample > 0 <= found.fixed
    assert parse_compute(found.text) == pytest.approx(found, abs=1e-9)
    for num in (few, many):
        assert found.of(num) == pytest.approx(true.of(num), rel=2 * noise + 1e-5)
    if not noise and few < many:
        assert found == pytest.approx(true, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "seconds", [{4: 0.3, 8: 0.2}, {4: 0.1, 8: 0.3}, {1: 0.0}, {1: 0.0, 9: 0.0}]
)
def test_a_fit_is_never_negative_and_right_at_the_whole_batch(seconds):
    found = Compute.fitted(seconds)
    assert found.per_sample > 0 <= found.fixed
    assert found.of(max(seconds)) == pytest.approx(seconds[max(seconds)], abs=1e-7)


def test_both_the_time_per_sample_and_the_time_per_pass_are_measured(monkeypatch):
    monkeypatch.setattr("ddpnb.rank.emulation.TRIAL_SECONDS", 0.4)

    def take_step(num_samples: int) -> None:
        end = time.thread_time() + 0.01 + 0.0005 * num_samples
        while time.thread_time() < end:
            pass

    assert measured(take_step, [8, 64]) == pytest.approx(Compute(0.0005, 0.01), rel=0.05)
