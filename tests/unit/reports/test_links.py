import pytest

from ddpnb.protocol.messages import RankState
from ddpnb.reports.inside.links import LinkMatrix
from ddpnb.session.inside import measured_ranks


def a_matrix(num_ranks: int, num_measured: int) -> LinkMatrix:
    pairs = [(a, b) for a in range(num_measured) for b in range(num_measured) if a != b]
    states = [
        RankState(
            rank=rank,
            local_rank=rank,
            world_size=num_ranks,
            pid=0,
            host=f"host-{rank // 2}",
            device="cpu",
            device_name="CPU",
            num_threads=1,
            backend="gloo",
        )
        for rank in range(num_ranks)
    ]
    latencies = {pair: 50e-6 if abs(pair[0] - pair[1]) == 1 else 2e-3 for pair in pairs}
    return LinkMatrix(latencies, dict.fromkeys(pairs, 1.25e8), states, 1.0)


def test_the_text_has_every_pair_and_names_the_hosts():
    text = repr(a_matrix(4, 4))
    assert "50 µs (125 MB/s)" in text
    assert "2 ms (125 MB/s)" in text
    assert all(f"{rank} host-{rank // 2}" in text for rank in range(4))


@pytest.mark.parametrize(("num_ranks", "num_measured"), [(2, 2), (8, 8), (64, 8)])
def test_the_bundle_has_a_picture_and_says_how_many_ranks_are_left_out(num_ranks, num_measured):
    bundle = a_matrix(num_ranks, num_measured)._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert ("56 more ranks not measured" in bundle["text/html"]) == (num_ranks == 64)


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        (["a"] * 4, (0, 1, 2, 3)),
        (["a"] * 16, tuple(range(8))),
        (["a"] * 8 + ["b"] * 8, (0, 1, 2, 3, 8, 9, 10, 11)),
        ([str(n) for n in range(12)], tuple(range(8))),
    ],
)
def test_of_many_ranks_the_first_of_each_host_are_measured(hosts, ranks):
    assert measured_ranks(hosts) == ranks
