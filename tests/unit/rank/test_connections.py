"""What ``nvidia-smi topo -m`` says lies between two GPUs."""

import pytest

from ddpnb.rank.machine import connection_in

SHOWN = """
        GPU0    GPU1    GPU2    mlx5_0  CPU Affinity
GPU0     X      NV1     SYS     PIX     0-19,40-59
GPU1    NV1      X      NV2     PHB     0-19,40-59
GPU2    SYS     NV2      X      SYS     0-19,40-59

Legend:
  X    = Self
"""


@pytest.mark.parametrize(
    ("one", "other", "expected"), [(0, 1, "NV1"), (1, 2, "NV2"), (2, 0, "SYS"), (0, 9, "")]
)
def test_the_cell_of_two_gpus_is_found(one, other, expected):
    assert connection_in(SHOWN, one, other) == expected
    assert connection_in("", one, other) == ""
