"""Do processes that fetch samples work in real ranks, and end with the run, however it ends?"""

import time
from typing import Any

import psutil

from tests.cluster.rig import wait_until
from tests.kernel.client import Kernel

CELL = """%%ddp_compare ddp --no-baseline --data-workers 2 --batch-size 16 --epochs EPOCHS
import os
import torch
from torch import nn
from torch.utils.data import Dataset

class Own(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index)) / 64, index % 2

def model():
    return nn.Linear(4, 2)

def data(split):
    return Own()
"""


def processes(kernel: Kernel) -> set[int]:
    """Return all that the kernel has started, and what that has started."""
    everything = psutil.Process(kernel.manager.provisioner.pid).children(recursive=True)
    return {child.pid for child in everything if child.status() != psutil.STATUS_ZOMBIE}


def begin(kernel: Kernel, epochs: Any, **changes: str) -> tuple[str, set[int], set[int]]:
    """Start a comparison; return it, the processes before it, and those that fetch."""
    before = processes(kernel)
    source = CELL.replace("EPOCHS", str(epochs))
    for old, new in changes.items():
        source = source.replace(old, new)
    request = kernel.begin(source)
    wait_until(lambda: len(processes(kernel) - before) >= 4, "four processes that fetch")
    return request, before, processes(kernel) - before


def gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def test_they_end_with_the_run(kernel: Kernel):
    request, _, fetching = begin(kernel, 40)
    assert kernel.wait(request).passed
    assert len(fetching) == 4
    assert gone(fetching)


def test_they_end_where_it_is_interrupted(kernel: Kernel):
    request, _, fetching = begin(kernel, 1e6)
    time.sleep(1)
    kernel.interrupt()
    cell = kernel.wait(request)
    assert cell.error == "KeyboardInterrupt"
    assert len(fetching) == 4
    assert gone(fetching)
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_they_end_with_a_rank_that_is_killed(kernel: Kernel):
    request, _, fetching = begin(kernel, 1e6, **{"ddp --no": "ddp --kill 1@2s --no"})
    cell = kernel.wait(request).passed
    assert "Rank 1 was killed by --kill" in cell.text
    assert len(fetching) == 4
    assert gone(fetching)


def test_they_do_not_end_what_a_rank_has_left_to_the_garbage_collector(kernel: Kernel):
    cell = kernel.run("""%%ddp --ranks 0
import gc, os
from torch.utils.data import DataLoader

class Group:
    def __init__(self):
        self.itself = self

    def __del__(self):
        ended_by.append(os.getpid())

class Own:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        gc.collect()
        return ended_by

ended_by = []
gc.disable()
Group()
fetched = list(DataLoader(Own(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
gc.enable()
fetched""")
    assert cell.passed.by_rank == {0: ["[[]]"]}
