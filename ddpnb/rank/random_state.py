"""Global random numbers: seeded, saved and restored, with torch's other globals (ranks)."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int | None) -> None:
    """Seed all global random numbers, those of GPUs too; None: differently in each process.

    A forked process begins with its parent's random state, as do all its siblings.
    """
    random.seed(seed)
    if seed is not None:
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return
    torch.seed()
    if "numpy.random" in sys.modules:  # else numpy seeds itself when it is imported
        np.random.seed()


@contextlib.contextmanager
def preserve_globals(device: torch.device) -> Iterator[None]:
    """Restore random numbers, default dtype and thread count when the block ends.

    Inside the block, ``device`` is the current device if it is a GPU.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(set_random_state, random_state(device))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all global random numbers."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if device.type == "cuda":  # all of them: the replicas of dp are on several
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _set_num_threads(num_threads: int) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
