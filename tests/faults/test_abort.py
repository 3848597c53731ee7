"""Another thread can release a rank if the backend's waits end by an abort, as with NCCL.

NCCL needs GPUs. Therefore these tests use a backend in Python. Its collectives wait until all
ranks take part or until they are aborted.
"""

import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from ddpnb.protocol.messages import RankState
from ddpnb.rank.cancellation import is_consequence
from ddpnb.rank.group import Group
from tests.rank.ranks import Ranks

ABORTED = "NCCL communicator was aborted on rank"


class StandIn(dist.ProcessGroup):
    """A backend that sums one number over the ranks through the store, or waits for an abort."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.this, self.num = store, rank, size
        self.calls: list[str] = []
        self.num_sums = 0
        self.aborted = threading.Event()

    def allreduce(self, tensors, options=None):
        if self.aborted.is_set():
            raise dist.DistBackendError(f"{ABORTED} {self.this}.")
        self.num_sums += 1
        key = f"sum-{self.num_sums}"
        self.store.add(key, int(tensors[0].item()))
        self.store.add(f"{key}-here", 1)
        while self.store.add(f"{key}-here", 0) < self.num:
            if self.aborted.wait(0.01):
                raise dist.DistBackendError(f"{ABORTED} {self.this}.")
        tensors[0].fill_(self.store.add(key, 0))
        done = torch.futures.Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    def abort(self) -> None:
        self.calls.append("abort")
        self.aborted.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "standin"


def member(rank: int, folder: Path) -> Group:
    if not hasattr(dist.Backend, "STANDIN"):
        dist.Backend.register_backend("standin", StandIn, devices=["cpu"])
    return Group(
        rank=rank,
        local_rank=rank,
        world_size=2,
        local_world_size=2,
        master=("127.0.0.1", 0),
        backend="standin",
        device=torch.device("cpu"),
        folder=folder,
    )


def cut_and_join_again(state: RankState, folder: Path):
    """Let rank 0 wait in two groups for rank 1 until another thread aborts both groups."""
    group = member(state.rank, folder)
    group.join(0)
    parts, errors = [dist.group.WORLD, dist.new_group([0, 1])], []
    if state.rank == 0:
        threading.Timer(0.5, group.abort).start()
        for part in parts:
            try:
                dist.all_reduce(torch.ones(1), group=part)
            except RuntimeError as error:
                errors.append((str(error), is_consequence(error)))
    is_known = dist.is_initialized()
    group.join(1)
    total = torch.ones(1)
    dist.all_reduce(total)
    return errors, is_known, [part.calls for part in parts], total.item()


def test_a_wait_ends_by_an_abort_and_the_next_group_works():
    with closing(Ranks(0)) as ranks:
        both = [ranks.outside(rank) for rank in range(2)]
        for each in both:
            each.begin(cut_and_join_again)
        (errors, is_known, calls, total), (*_, total_there) = (each.end() for each in both)
        for each in both:
            each.process.kill()
    assert errors == [(f"{ABORTED} 0.", True)] * 2
    assert is_known, "the next call must report the abort, not that there is no group"
    assert calls == [["abort", "abort", "shutdown"]] * 2  # the second abort precedes shutdown
    assert total == total_there == 2
