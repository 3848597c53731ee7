"""How long exchanges last over a link."""

import pytest

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.notation import parse_link
from ddpnb.rank.collectives import link as emulated_link
from ddpnb.rank.collectives.table import METHODS

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
    ("method", "num_ranks", "expected"),
    [
        # 1 MB takes 8 ms at 1 Gbit/s, and each message 0.5 ms more
        ("allreduce", 4, 6 * 0.5 + 1.5 * 8),
        ("reduce", 4, 2 * (0.5 + 8)),
        ("broadcast", 5, 3 * (0.5 + 8)),
        ("_allgather_base", 4, 3 * (0.5 + 8)),
        ("gather", 4, 2 * 0.5 + 3 * 8),
        ("alltoall_base", 4, 3 * (0.5 + 2)),
        ("barrier", 8, 3 * 0.5),
    ],
)
def test_a_collective_lasts_as_long_as_its_messages(method, num_ranks, expected):
    size = 0 if method == "barrier" else 10**6
    messages = METHODS[method].cost(size, num_ranks)
    assert 1000 * messages.seconds(GIGABIT) == pytest.approx(expected)


def test_a_gpu_does_not_wait_for_an_emulated_link():
    emulated_link.check("cpu")
    with pytest.raises(UserError):
        emulated_link.check("cuda:0")
