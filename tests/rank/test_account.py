"""The seconds and bytes of communication that a run's meter gets, whoever calls."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ddpnb.rank.collectives.account import Account
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.meter import Meter, NullTimer

SIZE = 1000
BYTES = 4 * SIZE


class Listed:
    """Stands for a ``Meter``: writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.sent = self.received = 0

    def count(self, *, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received

    def issued(self) -> None:
        self.heard.append("issued")

    @contextmanager
    def _context(self, name: str):
        self.heard.append(name)
        yield
        self.heard.append("over")

    def communicating(self):
        return self._context("communicating")

    def awaited(self):
        return self._context("awaited")


def accounted(state, folder, name):
    """Return what the meter hears of one of ``CALLS``."""
    meter = Listed()
    call = CALLS[name](state)
    dist.barrier()
    with listening(Account(meter)):
        call()
    call()
    return meter.heard, meter.sent, meter.received


def all_reduce(state):
    mine = torch.ones(SIZE)
    return lambda: dist.all_reduce(mine)


def in_the_background(state):
    mine = torch.ones(SIZE)
    return lambda: dist.all_reduce(mine, async_op=True).wait()


def broadcast(state):
    mine = torch.ones(SIZE)
    return lambda: dist.broadcast(mine, 1)


def reduce(state):
    mine = torch.ones(SIZE)
    return lambda: dist.reduce(mine, 1)


def all_gather(state):
    mine = torch.ones(SIZE)
    parts = [torch.ones(SIZE) for _ in range(state.world_size)]
    return lambda: dist.all_gather(parts, mine)


def reduce_scatter_single(state):
    mine, out = torch.ones(state.world_size * SIZE), torch.ones(SIZE)
    return lambda: dist.reduce_scatter_single(out, mine)


def in_a_pair(state):
    group, mine = dist.new_group([0, 1]), torch.ones(SIZE)
    return lambda: dist.all_reduce(mine, group=group) if state.rank < 2 else None


def from_rank_0_to_1(state):
    mine = torch.ones(SIZE)
    calls = {0: lambda: dist.send(mine, 1), 1: lambda: dist.recv(mine, 0)}
    return calls.get(state.rank, lambda: None)


def batch_of_messages(state):
    num, rank = state.world_size, state.rank
    mine, theirs = torch.ones(SIZE), torch.ones(SIZE)

    def call():
        ops = [
            dist.P2POp(dist.isend, mine, (rank + 1) % num),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % num),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return call


def functional_all_reduce(state):
    mine = torch.ones(SIZE)
    return lambda: functional.all_reduce(mine, "sum", dist.group.WORLD).sum()


def full_tensor(state):
    mesh = init_device_mesh("cpu", (state.world_size,))
    sharded = distribute_tensor(torch.ones(state.world_size * SIZE), mesh, [Shard(0)])
    return sharded.full_tensor


def barrier(state):
    return dist.barrier


CALLS = {
    each.__name__: each
    for each in (
        *(all_reduce, in_the_background, broadcast, reduce, all_gather, reduce_scatter_single),
        *(in_a_pair, from_rank_0_to_1, batch_of_messages),
        *(functional_all_reduce, full_tensor, barrier),
    )
}
BLOCKING = ["communicating", "over"]
AWAITED = ["issued", "awaited", "over"]


@pytest.mark.parametrize(
    ("name", "heard", "sent", "received"),
    [
        ("all_reduce", [BLOCKING] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("in_the_background", [AWAITED] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("broadcast", [BLOCKING] * 3, [0, 2, 0], [1, 0, 1]),
        ("reduce", [BLOCKING] * 3, [1, 0, 1], [0, 2, 0]),
        ("all_gather", [BLOCKING] * 3, [2] * 3, [2] * 3),
        ("reduce_scatter_single", [BLOCKING] * 3, [2] * 3, [2] * 3),
        ("in_a_pair", [BLOCKING, BLOCKING, []], [1, 1, 0], [1, 1, 0]),
        ("from_rank_0_to_1", [AWAITED, AWAITED, []], [1, 0, 0], [0, 1, 0]),
        ("batch_of_messages", [["issued", "issued"] + AWAITED[1:] * 2] * 3, [1] * 3, [1] * 3),
        ("functional_all_reduce", [["issued"]] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("full_tensor", [["issued"]] * 3, [2] * 3, [2] * 3),
        ("barrier", [BLOCKING] * 3, [0] * 3, [0] * 3),
    ],
)
def test_a_call_is_counted_once(ranks, name, heard, sent, received):
    found = ranks(3).call(accounted, name)
    assert [each[0] for each in found] == heard
    assert [each[1] / BYTES for each in found] == pytest.approx(sent, abs=0.01)
    assert [each[2] / BYTES for each in found] == pytest.approx(received, abs=0.01)


def ddp_step(state, folder):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20)))
    model(torch.ones(4, 10)).sum().backward()
    meter = Listed()
    with listening(Account(meter)):
        loss = model(torch.ones(4, 10)).sum()
        forward = list(meter.heard)
        loss.backward()
    return forward, meter.heard[len(forward) :]


def test_ddps_own_calls_are_heard(ranks):
    for forward, backward in ranks(2).call(ddp_step):
        assert set(forward) == {"communicating", "over"}  # its buffers
        assert backward == ["issued"]


def fsdp_step(state, folder):
    model = fully_shard(nn.Linear(SIZE, 10, bias=False))
    meter = Meter(NullTimer())
    with listening(Account(meter)):
        model(torch.ones(2, SIZE)).sum().backward()
    return meter.take()


def test_fsdps_exchanges_are_counted(ranks):
    for sent, received in ranks(2).call(fsdp_step):
        assert sent == received == 2 * 10 * BYTES / 2  # one gather: a root stays whole; one scatter
