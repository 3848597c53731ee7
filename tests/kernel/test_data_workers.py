"""Processes that fetch samples work on real ranks, and always end with their run."""

import time

import psutil
import pytest

from tests.cells import DATASET
from tests.cluster.rig import FORKS, wait_until, wait_until_gone
from tests.kernel.client import Kernel

COMPARE = "%%ddp_compare ddp --no-baseline --data-workers 2 --batch-size 16 --epochs "


@pytest.mark.parametrize(
    ("chosen", "end"), [("40", ""), ("1e6", "KeyboardInterrupt"), ("1e6 --kill 1@2s", "")]
)
def test_they_end_with_the_run(kernel: Kernel, chosen: str, end: str):
    before = kernel.processes

    def fetching() -> list[psutil.Process]:
        """Return the new processes, but not the trackers of processes that are not forked."""
        new = [process for process in kernel.processes if process not in before]
        return [each for each in new if "resource_tracker" not in str(each.cmdline())]

    cell = kernel.begin(COMPARE + chosen + DATASET)
    wait_until(lambda: len(fetching()) >= 4, "four processes that fetch")
    found = fetching()
    assert len(found) == 4
    if end:
        time.sleep(1)
        kernel.interrupt()
    kernel.wait(cell)
    assert cell.error == end
    assert ("rank 1 died" in cell.text) == ("kill" in chosen)
    wait_until_gone(found, timeout=10)
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


@FORKS
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
