"""Which strategy is recommended for where the ranks live?"""

from dataclasses import replace

import pytest

from ddpnb.reports.inside.advice import Advice
from tests.rank.ranks import make_state

CPU = make_state(0, 2)
GPU = replace(CPU, device="cuda:0", has_peer_access=True)


@pytest.mark.parametrize(
    ("ranks", "recommended", "tensorflow"),
    [
        ([GPU, GPU], "ddp", "MirroredStrategy"),
        ([replace(GPU, has_peer_access=False)] * 2, "central", "CentralStorageStrategy"),
        ([GPU, replace(GPU, host="other")], "ddp", "MultiWorkerMirroredStrategy"),
        ([CPU, CPU], "ddp-shm", "MirroredStrategy on CPUs"),
        ([CPU], "single", "OneDeviceStrategy"),
    ],
)
def test_the_table_has_a_cell_for_every_machine(ranks, recommended, tensorflow):
    choice = Advice.of(ranks).choice
    assert (choice.ddpnb, choice.tensorflow) == (recommended, tensorflow)


def test_the_table_marks_this_machine():
    bundle = Advice.of([GPU, GPU])._repr_mimebundle_()
    (marked,) = [line for line in bundle["text/plain"].splitlines() if "◀ this machine" in line]
    assert marked.startswith("one machine")
    assert bundle["text/html"].count("◀ this machine") == 1
