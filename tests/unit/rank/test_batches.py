"""All strategies see the same samples in the same order, each exactly once."""

from collections import OrderedDict

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks.batches import BatchSchedule, Shard, every_step, mapped


def make(num_samples=64, batch_size=10, num_epochs=1.0, num_ranks=3, seed=0) -> BatchSchedule:
    return BatchSchedule(
        num_samples,
        batch_size=batch_size,
        num_epochs=num_epochs,
        num_ranks=num_ranks,
        seed=seed,
    )


def seen(order: BatchSchedule, part: int, num_parts: int) -> list[torch.Tensor]:
    return [order.indices(s) for s in every_step(order.num_steps, part=part, num_parts=num_parts)]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_the_shards_of_a_step_together_are_the_global_batch(num_parts):
    order = make(num_epochs=2)
    parts = [seen(order, part, num_parts) for part in range(num_parts)]
    whole = seen(order, 0, 1)
    for step, batch in enumerate(whole):
        shards = [part[step] for part in parts]
        dealt = torch.empty_like(batch)
        for part, shard in enumerate(shards):
            dealt[part::num_parts] = shard
        assert torch.equal(dealt, batch)
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
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


def test_an_epoch_has_each_sample_once_but_for_those_that_no_rank_could_share():
    first = torch.cat(seen(make(num_samples=64, num_ranks=3), 0, 1))
    assert len(first) == len(first.unique()) == 63
    assert make(num_samples=64, num_ranks=3, num_epochs=2).num_samples == 2 * 63


def test_an_epoch_has_each_sample_once_and_the_next_another_order():
    order = make(num_epochs=2, num_ranks=2)
    batches = seen(order, 0, 1)
    first, second = torch.cat(batches[:7]), torch.cat(batches[7:])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(64))
    assert not torch.equal(first, second)
    assert torch.equal(torch.cat(seen(make(num_epochs=2, num_ranks=2), 0, 1)), torch.cat(batches))
    assert not torch.equal(torch.cat(seen(make(seed=1, num_ranks=2), 0, 1)), first)


@pytest.mark.parametrize(("num_samples", "num_steps"), [(62, 6), (63, 7), (60, 6)])
def test_the_last_batch_is_left_out_only_where_a_rank_would_get_nothing(num_samples, num_steps):
    order = make(num_samples=num_samples)
    assert order.num_steps == num_steps
    assert order.num_samples == sum(map(len, seen(order, 0, 1)))


@pytest.mark.parametrize(("num_epochs", "num_steps"), [(0.5, 4), (2.5, 18), (0.001, 1)])
def test_epochs_may_end_in_the_middle(num_epochs, num_steps):
    order = make(num_epochs=num_epochs)
    assert order.num_steps == num_steps
    assert order.num_samples == sum(map(len, seen(order, 0, 1)))


def test_the_smallest_shard_is_of_the_smallest_batch():
    assert make().smallest_shard(3) == Shard(step=6, part=2, num_parts=3)
    assert make(num_samples=60).smallest_shard(2) == Shard(step=0, part=1, num_parts=2)
    assert make(num_epochs=0.2).smallest_shard(2) == Shard(step=0, part=1, num_parts=2)


def test_a_batch_that_cannot_be_shared_or_filled_is_refused():
    with pytest.raises(UserError, match="cannot be shared by 3 ranks; give --batch-size 3"):
        make(batch_size=2)
    with pytest.raises(UserError, match=r"larger than the training split \(64 samples\)"):
        make(batch_size=65)


class Outputs(OrderedDict):
    """Like the outputs of transformers' models, it refuses ``update``."""

    def update(self, *_: object) -> None:
        raise TypeError("You cannot use update")

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


def test_a_mapping_keeps_its_class():
    outputs = Outputs()
    outputs["logits"], outputs["hidden"] = torch.ones(2), (torch.zeros(1), "a text")
    found = mapped(lambda leaf: leaf + leaf, outputs)
    assert type(found) is Outputs
    assert found.logits.tolist() == found["logits"].tolist() == [2, 2]
    assert found.hidden == (torch.zeros(1), "a texta text")
    assert outputs.logits.tolist() == [1, 1]
