"""Names that an exported script may define for its cell.  Runs on torchrun's ranks."""

import os
import random

import numpy as np
import torch

rank = int(os.environ.get("RANK", "0"))
local_rank = int(os.environ.get("LOCAL_RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
local_gpu = local_rank % max(1, torch.cuda.device_count())
device = torch.device(f"cuda:{local_gpu}" if torch.cuda.is_available() else "cpu")


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
