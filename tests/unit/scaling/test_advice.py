"""Which strategy is recommended for what the ranks have measured?"""

import pytest

from ddpnb.reports.inside.advice import AdviceResult, advise, link_of
from ddpnb.scaling.links import ring
from tests.unit.scaling.machines import gpu, rank


@pytest.mark.parametrize(
    ("ranks", "recommended", "tensorflow"),
    [
        ([gpu(0), gpu(1)], "ddp", "MirroredStrategy"),
        ([gpu(0, has_peer_access=False), gpu(1)], "central", "CentralStorageStrategy"),
        (
            [gpu(n, host=str(n), has_peer_access=None) for n in range(2)],
            "ddp",
            "MultiWorkerMirroredStrategy",
        ),
        ([rank(0), rank(1)], "ddp-shm", "MirroredStrategy on CPUs"),
        ([rank(0)], "single", "OneDeviceStrategy"),
    ],
)
def test_the_table_has_a_cell_for_every_machine(ranks, recommended, tensorflow):
    advice = advise(ranks)
    assert (advice.choice.ddpnb, advice.choice.tensorflow) == (recommended, tensorflow)
    assert not advice.instead
    assert advice.reasons


def test_what_was_measured_can_overrule_the_table():
    slow_memory = [rank(0, shared_all_reduce=9e-3), rank(1, shared_all_reduce=9e-3)]
    assert advise(slow_memory).instead == "ddp"
    uneven = advise([gpu(0), gpu(1, flops=4e10, device_name="K80")])
    assert uneven.instead == "async"
    assert "2.5 times as fast as the slowest" in uneven.reasons[1]
    busy = advise([rank(0), rank(1, flops=4e10)])
    assert not busy.instead
    assert "something else uses this machine" in " ".join(busy.reasons)


def test_the_link_is_what_gives_both_all_reduces():
    ranks = [rank(n) for n in range(4)]
    link = link_of(ranks)
    assert link is not None
    assert ring(link, ranks[0].all_reduce_bytes, 4) == pytest.approx(ranks[0].all_reduce, rel=0.01)
    assert link_of(ranks[:1]) is None


def test_the_table_marks_this_machine_and_says_what_was_measured():
    result = AdviceResult([gpu(0), gpu(1)], 3.2)
    text, html = repr(result), result._repr_html_()
    marked = [line for line in text.splitlines() if "◀ this machine" in line]
    assert len(marked) == 1
    assert marked[0].startswith("one machine")
    assert html.count("◀ this machine") == 1
    for part in ("Measured in 3.2 s", "peer access"):
        assert part in text
        assert part in html
    assert set(result._repr_mimebundle_()) == {"text/plain", "text/html"}
