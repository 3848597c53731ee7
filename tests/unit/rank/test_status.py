"""A rank's status names the collective that its GPU waits in, and tells causes from results."""

import time

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from ddpnb.compat import torch_internals
from ddpnb.compat.torch_internals import pending_collective
from ddpnb.rank.cancellation import ConsequenceError, is_consequence


def entry(name: str, *, state: str, age: float) -> dict:
    return {
        "profiling_name": f"nccl:{name}",
        "state": state,
        "retired": state == "completed",
        "time_created_ns": time.time_ns() - int(age * 1e9),
        "input_dtypes": ["Float"],
        "input_sizes": [[3]],
    }


WAITED_FOR = ("all_reduce", "Float [3]")


@pytest.mark.parametrize(
    ("state", "age", "expected"),
    [
        ("started", 5, WAITED_FOR),
        ("started", 0.1, None),  # too short to be a wait
        ("scheduled", 5, None),  # the GPU still computes earlier work
        ("completed", 5, None),
        ("started", 50, None),  # a collective of an older group
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
    assert pending_collective(time.time_ns() - int(20e9), seconds_on_gpu=1.0) == expected


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConsequenceError("freed"), True),
        (RuntimeError(GLOO), True),
        (DistNetworkError("recvValue failed: Connection reset by peer"), True),
        (DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (DistBackendError("unhandled system error"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("the camera said: Connection reset by peer"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
    ],
)
def test_an_error_of_the_users_own_is_no_consequence(error, expected):
    assert is_consequence(error) is expected
