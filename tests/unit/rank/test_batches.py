"""All strategies train on the same samples in the same order, and on each exactly once."""

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, every_step


def make(num_samples: int = 64, **changes) -> BatchSchedule:
    usual = {"batch_size": 10, "num_epochs": 1, "num_ranks": 3, "seed": 0}
    return BatchSchedule(num_samples, **usual | changes)


def seen(order: BatchSchedule, part: int = 0, num_parts: int = 1) -> list[torch.Tensor]:
    return [order.indices(s) for s in every_step(order.num_steps, part=part, num_parts=num_parts)]


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
    assert make().smallest_shard(3) == Shard(step=6, part=2, num_parts=3)
    assert make(num_samples=60).smallest_shard(2) == Shard(step=0, part=1, num_parts=2)
    assert make(num_epochs=0.2).smallest_shard(2) == Shard(step=0, part=1, num_parts=2)


@pytest.mark.parametrize("batch_size", [2, 65])
def test_a_batch_that_cannot_be_shared_or_filled_is_refused(batch_size):
    with pytest.raises(UserError, match="--batch-size"):
        make(batch_size=batch_size)
