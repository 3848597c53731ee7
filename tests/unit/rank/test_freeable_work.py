"""A wait in slices ends as the collective does, however the two meet."""

from datetime import timedelta

import pytest

from ddpnb.rank.comm.rendezvous import CancellationToken, FreeableWork


class EndsAfterSlice:
    """A collective that ends between the end of a slice and the next look at it, as torch's."""

    def __init__(self, error: str = "") -> None:
        self.has_ended = False
        self.error = error

    def wait(self, timeout: timedelta) -> bool:
        if not self.has_ended:
            self.has_ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.has_ended


def test_a_collective_that_ends_just_after_a_slice_has_not_failed():
    assert FreeableWork(EndsAfterSlice(), CancellationToken()).wait() is True


def test_one_that_fails_then_raises_its_own_error():
    with pytest.raises(RuntimeError, match="closed by peer"):
        FreeableWork(EndsAfterSlice("closed by peer"), CancellationToken()).wait()
