"""How long exchanges last over a link, and when they end; no process, no torch.distributed."""

import time
from pathlib import Path

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_link
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.costs import COLLECTIVES
from ddpnb.rank.collectives.link import Timeline

GIGABIT = parse_link("1Gbit,0.5ms")


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("1Gbit,0.5ms", 1e9, 0.5e-3),
        ("100mbit/s,2MS", 1e8, 2e-3),
        ("56.6kbit, 1s", 56_600, 1),
    ],
)
def test_a_link_is_a_rate_and_a_latency(text, rate, latency):
    found = parse_link(text)
    assert (found.bits_per_second, found.latency_seconds) == pytest.approx((rate, latency))


@pytest.mark.parametrize(
    ("operation", "num_ranks", "expected"),
    [
        # 1 MB takes 8 ms at 1 Gbit/s, and each message 0.5 ms more
        ("allreduce_", 4, 6 * 0.5 + 1.5 * 8),
        ("reduce_", 4, 2 * (0.5 + 8)),
        ("broadcast_", 5, 3 * (0.5 + 8)),
        ("_allgather_base_", 4, 3 * (0.5 + 8)),
        ("gather_", 4, 2 * 0.5 + 3 * 8),
        ("alltoall_base_", 4, 3 * (0.5 + 2)),
        ("barrier", 8, 3 * 0.5),
    ],
)
def test_a_collective_lasts_as_long_as_its_messages(operation, num_ranks, expected):
    size = 0 if operation == "barrier" else 10**6
    messages = COLLECTIVES[operation](size, num_ranks)
    assert 1000 * messages.seconds(GIGABIT) == pytest.approx(expected)


@pytest.fixture
def timelines(tmp_path: Path):
    """One file, mapped by three ranks."""
    made = [Timeline(tmp_path / "times", 3) for _ in range(3)]
    yield made
    for each in made:
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_messages_to_one_rank_follow_each_other(timelines):
    began = time.monotonic()
    ends = [timelines[rank].reserve(rank, 0, 10.0) for rank in (1, 2)]
    assert ends[0] - began == pytest.approx(10, abs=1)
    assert ends[1] - ends[0] == pytest.approx(10)
    back = timelines[0].reserve(0, 1, 10.0)  # the other direction is free
    assert back - began == pytest.approx(10, abs=1)


def test_a_gpu_does_not_wait_for_an_emulated_link():
    emulated_link.check("cpu")
    with pytest.raises(UserError):
        emulated_link.check("cuda:0")
