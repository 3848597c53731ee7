"""How a test orders the steps of different ranks, on any machine."""

import time
from pathlib import Path

SECONDS = 30.0


def wait_for(sign: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + SECONDS
    while not sign.exists():
        assert time.monotonic() < deadline, f"the sign did not come: {sign.name}"
        time.sleep(0.002)


def hold_rank_1(sign: Path, num_steps: int, rank: int, step: int) -> None:
    """Before each step: hold rank 1 at its step 2 until rank 0 has made so many.

    The others wait until it is there, however busy the machine is, and leave it some shares.
    """
    held = sign.with_name("held")
    if rank == 1 and step == 2:
        held.touch()
        wait_for(sign)
    if rank == 0 and step == 3:
        wait_for(held)
    if rank == 0 and step == num_steps:
        sign.touch()
    if rank == 2 and step == 3:
        wait_for(sign)


def unhurried(rank: int, step: int) -> None:
    """Before each step: leave the others time for theirs."""
    time.sleep(0.004)
