"""A rank reads another rank's times only once all of their bytes are visible."""

from pathlib import Path

import numpy as np

from ddpnb.rank.collectives.shared_memory import NUM_CALLS, Board


class TornError(Exception):
    """Raised instead of waiting for the rest of a place."""


def stop() -> None:
    raise TornError


def test_a_torn_place_is_never_read(tmp_path: Path) -> None:
    """Any bytes of a call may become visible before the others, for example on aarch64."""
    board = Board(tmp_path / "board", 1, stop)
    shared, random = np.memmap(tmp_path / "board", np.uint8, "r+"), np.random.default_rng(0)
    num, num_read = 3 * NUM_CALLS, 0
    for number in range(num):
        ready = tuple(random.integers(0, 3, 2).astype(float))  # often equal to older times
        old = shared.copy()
        board.post(number, 0, ready)
        new = shared.copy()
        shared[:] = np.where(random.random(len(new)) < random.random(), new, old)
        try:
            assert board.read(number, 0) == ready
            num_read += 1
        except TornError:
            shared[:] = new
            assert board.read(number, 0) == ready
    assert 0 < num_read < num
