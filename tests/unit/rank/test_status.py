"""What a rank's flight recorder says of a wait on a GPU."""

import time

import pytest

from ddpnb.compat import torch_internals
from ddpnb.compat.torch_internals import PendingCollective, collective_on_gpu


def entry(name: str, *, state: str, age: float) -> dict:
    return {
        "profiling_name": f"nccl:{name}",
        "state": state,
        "retired": state == "completed",
        "time_created_ns": time.time_ns() - int(age * 1e9),
        "input_dtypes": ["Float"],
        "input_sizes": [[3]],
    }


WAITED_FOR = PendingCollective("all_reduce", "Float [3]")


@pytest.mark.parametrize(
    ("state", "age", "expected"),
    [
        ("started", 5, WAITED_FOR),
        ("started", 0.1, None),  # it may be on its way
        ("scheduled", 5, None),  # the GPU computes what comes before
        ("completed", 5, None),
        ("started", 50, None),  # of an older group
    ],
)
def test_a_gpu_waits_in_the_collective_that_it_has_started(monkeypatch, state, age, expected):
    found = [
        entry("broadcast", state="completed", age=6),
        entry("all_reduce", state=state, age=age),
        entry("all_gather", state="scheduled", age=age),
    ]
    monkeypatch.setattr(torch_internals, "_recorded", lambda: found)
    monkeypatch.setattr(torch_internals.dist, "is_initialized", lambda: True)
    assert collective_on_gpu(time.time_ns() - int(20e9), 1.0) == expected
