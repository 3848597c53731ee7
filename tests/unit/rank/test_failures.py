import weakref

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from ddpnb.rank.cancellation import ConsequenceError, is_consequence
from ddpnb.rank.cells import release_frames


class Loader:
    """Anything that a frame holds and that must end."""


def test_frames_are_released_whatever_an_error_was_raised_from():
    held = []

    def interrupted() -> None:
        loader = Loader()
        held.append(weakref.ref(loader))
        raise KeyboardInterrupt

    try:
        try:
            interrupted()
        except KeyboardInterrupt:
            raise RuntimeError("the cell's own") from ValueError("another")
    except RuntimeError as error:
        release_frames(error)
        (loader,) = held
        assert loader() is None


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
