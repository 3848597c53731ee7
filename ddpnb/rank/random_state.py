"""Seeds and restores random generators and torch's settings.  Runs on the ranks."""

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch


def seed_everything(seed: int | None) -> None:
    """Seed all global random generators, also on GPUs.

    If ``seed`` is None, each process gets a different seed.  Forked processes must be seeded,
    because each of them begins with the random state of the parent process.
    """
    random.seed(seed)
    if seed is not None:
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return
    torch.seed()
    if "numpy.random" in sys.modules:  # otherwise numpy seeds itself on import
        np.random.seed()


@contextlib.contextmanager
def preserve_globals(device: torch.device) -> Iterator[None]:
    """Restore the random state, default dtype and thread count when the block ends.

    If ``device`` is a GPU, it is the current device inside the block.
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
    """Restore the state of all global random generators when the block ends."""
    # all GPUs, because dp has replicas on several GPUs
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    in_numpy, in_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            np.random.set_state(in_numpy)
            random.setstate(in_python)
