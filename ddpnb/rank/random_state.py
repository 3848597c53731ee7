"""Global random numbers: seeded, saved and restored, with torch's other globals (ranks)."""

import contextlib
import random
import sys
from collections.abc import Iterator

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
    num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with preserve_random(device), on_gpu:
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


@contextlib.contextmanager
def preserve_random(device: torch.device) -> Iterator[None]:
    """Restore all global random numbers when the block ends."""
    # all GPUs: the replicas of dp are on several
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    in_numpy, in_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            np.random.set_state(in_numpy)
            random.setstate(in_python)
