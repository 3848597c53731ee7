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
    advice = Advice.of(ranks)
    assert (advice.choice.ddpnb, advice.choice.tensorflow) == (recommended, tensorflow)
    assert advice._repr_mimebundle_()["text/html"].count("◀ this machine") == 1
