"""How does a training leave what is the user's as it was?  (Every rank.)"""

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore random numbers, default dtype and thread count when the block ends.

    Inside the block, ``device`` is the current one where it is a GPU.
    """
    numbers = random.getstate()
    numpy_numbers = np.random.get_state()
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    gpus = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.callback(_set_num_threads, num_threads)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(np.random.set_state, numpy_numbers)
        stack.callback(random.setstate, numbers)
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        for gpu in gpus:
            stack.enter_context(torch.cuda.device(gpu))
        yield


def seed_everything(seed: int) -> None:
    """Start all global random numbers anew, those of GPUs too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_from_entropy() -> None:
    """Start all global random numbers where no other process does, those of GPUs when used.

    A forked process begins with the numbers of its parent, and so would all its siblings.
    """
    random.seed()
    torch.seed()
    if "numpy.random" in sys.modules:  # else it is imported, and seeded so, when first used
        np.random.seed()


def _set_num_threads(num_threads: int) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
