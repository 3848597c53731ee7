"""The samples of each rank, from torch's sampler to the picture, without a cluster."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from ddpnb.protocol.inspection import RankSamples, SamplerSpec
from ddpnb.rank.inspection import samplers as on_rank
from ddpnb.reports.inspection.samples import MAX_CELLS, Handout, handout_of
from tests.rank.ranks import make_state


def handed_out(num_ranks: int, spec: SamplerSpec, **namespace: object) -> Handout:
    found = [
        on_rank.handed_out(spec, make_state(rank, num_ranks), dict(namespace))
        for rank in range(num_ranks)
    ]
    return handout_of(spec, found)


def test_padding_repeats_samples_and_drop_last_leaves_some_out():
    padded = handed_out(4, SamplerSpec(num_samples=30))
    assert [row.repeated().tolist() for row in padded.rows] == [[0, 1]] * 3
    assert padded.rows[0].owners()[0] == [0, 2]
    assert padded.rows[0].shares() == "8 each"
    assert padded.table().rows[2][1].text == "2 6 10 14 18 22 26 0"
    assert "Used more than once: 2 samples, because padding gives" in padded.notes[0]
    dropped = handed_out(4, SamplerSpec(num_samples=30, drop_last=True))
    assert dropped.rows[0].absent().tolist() == [28, 29]
    drawn = [each.get_text() for each in dropped.plot().figure.axes[0].texts]
    assert drawn.count("×") == 3 * 2


def test_set_epoch_shuffles_anew_and_its_absence_is_said():
    in_order = handed_out(2, SamplerSpec(num_samples=20, sets_epoch=False))
    assert "Every epoch is the same: there is no shuffling." in in_order.notes
    spec = SamplerSpec(num_samples=20, shuffle=True)
    shuffled = handed_out(2, spec)
    assert not shuffled.rows[1].is_like(shuffled.rows[0])
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1)
    sampler.set_epoch(2)
    assert shuffled.rows[2].handed_out[1].tolist() == list(sampler)
    stuck = handed_out(2, replace(spec, sets_epoch=False))
    assert stuck.rows[1].is_like(stuck.rows[0])
    assert "your code must call set_epoch(epoch)" in stuck.notes[0]


def test_a_loader_whose_epoch_nobody_sets_repeats_itself():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=0)
    forgotten = handed_out(2, SamplerSpec(expression="sampler"), sampler=sampler)
    assert forgotten.rows[1].is_like(forgotten.rows[0])
    assert "set_epoch(epoch) yet" in forgotten.notes[-1]
    sampler.set_epoch(1)
    called = handed_out(2, SamplerSpec(expression="sampler"), sampler=sampler)
    assert not called.rows[1].is_like(called.rows[0])


def test_a_loader_is_read_without_consuming_it():
    data = TensorDataset(torch.arange(20))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_size=3, shuffle=True, generator=generator, drop_last=True)
    before, own = torch.get_rng_state(), generator.get_state()
    handout = handed_out(2, SamplerSpec(expression="loader"), loader=loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)
    assert len(handout.rows[0].handed_out[0]) == 18  # only whole batches
    assert "Every rank gets the same samples, so they do the same work 2 times" in handout.notes[0]
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    sampler.set_epoch(7)
    batches = BatchSampler(sampler, 4, drop_last=False)
    handed_out(2, SamplerSpec(expression="batches"), batches=batches)
    by_hand = DataLoader(data, batch_sampler=[[3, 1], [2]])  # any iterable works
    assert handed_out(1, SamplerSpec(expression="x"), x=by_hand).rows[0].shares() == "3 each"
    assert sampler.epoch == 7
    assert sampler.dataset is data


@pytest.mark.parametrize(("num_ranks", "num_samples"), [(2, 5), (40, 1000)])
def test_pictures_stay_on_their_paper(num_ranks: int, num_samples: int):
    handout = handed_out(num_ranks, SamplerSpec(num_samples=num_samples, shuffle=True))
    figure = handout.plot().figure
    figure.canvas.draw()
    for text in figure.axes[0].texts:
        box = text.get_window_extent()
        assert figure.bbox.contains(*box.min)
        assert figure.bbox.contains(*box.max)
    assert all(len(row.owners()) <= MAX_CELLS for row in handout.rows)


def test_ranks_with_other_samplers_are_said():
    first = RankSamples(kind="A", num_samples=4, epochs=(np.arange(4),))
    other = replace(first, kind="B", num_samples=5, epochs=(np.arange(2),))
    handout = handout_of(SamplerSpec(expression="x", num_epochs=1), [first, other])
    assert "The ranks have different samplers: A and B." in handout.notes
    assert handout.rows[0].shares() == "2 to 4 each"
