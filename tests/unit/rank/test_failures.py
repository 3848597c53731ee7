"""Which errors of a rank are the consequence of another's."""

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from ddpnb.rank.cancellation import ConsequenceError, is_consequence

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
