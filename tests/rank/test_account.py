"""The seconds and bytes of communication that a run's meter gets, whoever calls."""

from contextlib import contextmanager
from functools import partialmethod

import pytest
import torch.distributed as dist

from ddpnb.rank.collectives.account import Account
from ddpnb.rank.collectives.intercept import listening

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

    communicating = partialmethod(_context, "communicating")
    awaited = partialmethod(_context, "awaited")


def accounted(state, folder, name):
    """Return what the meter hears of one of ``CALLS``."""
    meter = Listed()
    namespace = {"rank": state.rank, "num": state.world_size}
    prepare, call = CALLS[name]
    exec(SETUP + prepare, namespace)
    dist.barrier()
    with listening(Account(meter)):
        exec(call, namespace)
    return meter.heard, meter.sent, meter.received


SETUP = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
mine, theirs = torch.ones({SIZE}), torch.ones({SIZE})
"""
OPS = """
ops = [dist.P2POp(dist.isend, mine, (rank + 1) % num)]
ops += [dist.P2POp(dist.irecv, theirs, (rank - 1) % num)]
"""
DDP = f"""
model = DistributedDataParallel(nn.Linear({SIZE}, 1, bias=False))
for _ in range(2): model(mine).backward()  # then its buckets stay
"""
BUFFER = f"""
model = nn.Linear({SIZE}, 1, bias=False)
model.register_buffer("kept", torch.ones({SIZE}))
ddp = DistributedDataParallel(model)
for _ in range(2): ddp(mine).backward()
"""
CALLS = {
    "all_reduce": ("", "dist.all_reduce(mine)"),
    "in the background": ("", "dist.all_reduce(mine, async_op=True).wait()"),
    "broadcast": ("", "dist.broadcast(mine, 1)"),
    "all_gather": ("parts = [theirs.clone() for _ in range(num)]", "dist.all_gather(parts, mine)"),
    "in a pair": (
        "pair = dist.new_group([0, 1])",
        "if rank < 2: dist.all_reduce(mine, group=pair)",
    ),
    "from rank 0 to 1": ("", "[dist.send, dist.recv][rank](mine, 1 - rank) if rank < 2 else None"),
    "batch of messages": (OPS, "for work in dist.batch_isend_irecv(ops): work.wait()"),
    "functional": ("", "functional.all_reduce(mine, 'sum', dist.group.WORLD).sum()"),
    "backward of DDP": (DDP, "model(mine).backward()"),
    "buffer of DDP": (BUFFER, "ddp(mine)"),
    "FSDP": (
        f"model = fully_shard(nn.Linear({SIZE}, num, bias=False))",
        "model(mine).sum().backward()",
    ),
}
BLOCKING = ["communicating", "over"]
AWAITED = ["issued", "awaited", "over"]


@pytest.mark.parametrize(
    ("name", "heard", "sent", "received"),
    [
        ("all_reduce", [BLOCKING] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("in the background", [AWAITED] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("broadcast", [BLOCKING] * 3, [0, 2, 0], [1, 0, 1]),
        ("all_gather", [BLOCKING] * 3, [2] * 3, [2] * 3),
        ("in a pair", [BLOCKING, BLOCKING, []], [1, 1, 0], [1, 1, 0]),
        ("from rank 0 to 1", [AWAITED, AWAITED, []], [1, 0, 0], [0, 1, 0]),
        ("batch of messages", [["issued", "issued"] + AWAITED[1:] * 2] * 3, [1] * 3, [1] * 3),
        ("functional", [["issued"]] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("backward of DDP", [["issued"]] * 3, [4 / 3] * 3, [4 / 3] * 3),
        ("buffer of DDP", [BLOCKING] * 3, [2, 0, 0], [0, 1, 1]),
        ("FSDP", None, [4] * 3, [4] * 3),  # one gather: a root stays whole; one scatter
    ],
)
def test_a_call_is_counted_once(ranks, name, heard, sent, received):
    found = ranks(3).call(accounted, name)
    assert heard is None or [each[0] for each in found] == heard
    assert [each[1] / BYTES for each in found] == pytest.approx(sent, abs=0.01)
    assert [each[2] / BYTES for each in found] == pytest.approx(received, abs=0.01)
