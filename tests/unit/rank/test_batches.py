"""All strategies train on the same samples in the same order, and on each exactly once."""

import random
from collections import UserDict, namedtuple
from dataclasses import make_dataclass
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks import batches
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, every_step, num_rows, rows, tensors_of


def make(num_samples: int = 64, **changes) -> BatchSchedule:
    usual = {"batch_size": 10, "num_epochs": 1, "num_ranks": 3, "seed": 0}
    return BatchSchedule(num_samples, **usual | changes)


def seen(order: BatchSchedule, index: int = 0, num_shards: int = 1) -> list[torch.Tensor]:
    shards = every_step(order.num_steps, index=index, num_shards=num_shards)
    return [order.indices(shard) for shard in shards]


def test_the_shards_of_a_step_together_are_the_global_batch():
    order = make(num_epochs=2)
    for step, (batch, *shards) in enumerate(
        zip(seen(order), *(seen(order, part, 3) for part in range(3)), strict=True)
    ):
        dealt = torch.empty_like(batch)
        for part, shard in enumerate(shards):
            dealt[part::3] = shard
        assert torch.equal(dealt, batch)
        assert order.size(step) == len(batch)


@pytest.mark.parametrize("num_samples", [60, 64, 65])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_where_ranks_share_evenly_the_order_is_that_of_torchs_own_sampler(num_samples, num_ranks):
    order = make(num_samples=num_samples, batch_size=30, num_epochs=3, num_ranks=num_ranks, seed=7)
    for rank in range(num_ranks):
        sampler = DistributedSampler(
            range(num_samples), num_replicas=num_ranks, rank=rank, seed=7, drop_last=True
        )
        expected = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected += BatchSampler(sampler, 30 // num_ranks, drop_last=False)
        assert [shard.tolist() for shard in seen(order, rank, num_ranks)] == expected


@pytest.mark.parametrize(
    ("num_samples", "num_epochs", "num_steps"),
    [(62, 1, 6), (63, 1, 7), (60, 1, 6), (64, 0.5, 4), (64, 2.5, 18), (64, 0.001, 1)],
)
def test_the_last_batch_is_left_out_only_where_a_rank_would_get_nothing(
    num_samples, num_epochs, num_steps
):
    order = make(num_samples, num_epochs=num_epochs)
    assert order.num_steps == num_steps
    assert order.num_samples == sum(map(len, seen(order)))


def test_the_smallest_shard_is_of_the_smallest_batch():
    assert make().smallest_shard(3) == Shard(step=6, index=2, num_shards=3)
    assert make(num_samples=60).smallest_shard(2) == Shard(step=0, index=1, num_shards=2)
    assert make(num_epochs=0.2).smallest_shard(2) == Shard(step=0, index=1, num_shards=2)


@pytest.mark.parametrize("batch_size", [2, 65])
def test_a_batch_that_cannot_be_shared_or_filled_is_refused(batch_size):
    with pytest.raises(UserError, match="--batch-size"):
        make(batch_size=batch_size)


class Slotted:
    __slots__ = ("__hidden", "y")

    def __init__(self, x, y):
        self.__hidden, self.y = x, y


class Plain:
    def __init__(self, x, y):
        self.x, self.y, self.itself = x, y, self


NODES = [
    lambda x, y: (x, y),
    lambda x, y: [x, y],
    lambda x, y: {"x": x, "y": y},
    lambda x, y: UserDict(x=x, y=y),
    lambda x, y: MappingProxyType({"x": x, "y": y}),
    lambda x, y: SimpleNamespace(x=x, y=y, kept=3),
    namedtuple("Pair", "x y"),
    make_dataclass("Frozen", ["x", "y"], frozen=True),
    make_dataclass("Small", ["x", "y"], slots=True),
    Slotted,
    Plain,
]


def random_batch(draw: random.Random, num_samples: int, depth: int = 3):
    """Return a tree of random nodes. Its first leaf is a tensor, and some others are not."""
    leaf = torch.randn(num_samples, *([3] * draw.randrange(3)))
    if not depth:
        return leaf
    first = random_batch(draw, num_samples, draw.randrange(depth))
    others = [first, leaf.numpy(), [f"text {n}" for n in range(num_samples)], 7, None]
    return draw.choice(NODES)(first, draw.choice(others))


@pytest.mark.parametrize("seed", range(15))
def test_any_batch_is_cut_into_all_its_rows_and_moved_as_a_whole(seed):
    draw = random.Random(seed)
    num_samples = draw.randrange(6, 12)
    batch = random_batch(draw, num_samples)
    bounds = [0, 2, draw.randrange(4, num_samples - 1), num_samples]
    cut = [rows(batch, *pair, num_samples) for pair in pairwise(bounds)]
    assert {type(each) for each in cut} == {type(batch)}
    for whole, *parts in zip(*map(tensors_of, [batch, *cut]), strict=True):
        assert torch.equal(torch.cat(parts), whole)
    assert [num_rows(each, 99) for each in cut] == np.diff(bounds).tolist()
    assert all(each.is_meta for each in tensors_of(batches.moved(batch, torch.device("meta"))))


@pytest.mark.parametrize(
    ("batch", "num_items", "expected"),
    [
        ((torch.ones(13, 3), torch.ones(13)), 16, 13),
        ({"words": torch.ones(56), "starts": torch.ones(16), "y": torch.ones(16)}, 16, 16),
        ({"words": torch.ones(56), "y": torch.ones(56), "ends": torch.ones(17)}, 16, 56),
        (([torch.ones(n, 4) for n in range(13)], [{"box": torch.ones(2, 4)}] * 13), 16, 13),
        ([{"x": torch.ones(4), "y": 1}] * 13, 16, 13),
        (((torch.ones(13, 3), torch.ones(13, 2)), torch.ones(13)), 2, 13),
        ((np.ones((5, 2)), torch.ones(5)), 8, 5),
        ((torch.ones(0, 4), torch.ones(0)), 8, 0),
        (3, 8, 8),
    ],
)
def test_samples_are_counted_by_rows(batch, num_items, expected):
    assert num_rows(batch, num_items) == expected
