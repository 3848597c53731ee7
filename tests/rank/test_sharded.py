"""Sharded strategies train like one process, and report the bytes that each rank sends."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ddpnb.rank.strategies.fsdp import gathered_layers
from ddpnb.rank.tasks import text
from tests.rank.fit import Problem, by_hand, by_strategy, distance

WIDE = [(6, 96), *[(96, 96)] * 6, (96, 3)]
"""Inputs and outputs of the layers of a model that can be sharded evenly."""


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in WIDE))


class Blocks(nn.Module):
    """A model with a block that is used twice, tied weights, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.often = nn.ModuleList([self.blocks[0], nn.Linear(6, 6), nn.Identity()])
        self.tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 3)))
        self.tied[0].weight = self.symbol.weight
        self.register_buffer("scale", torch.tensor(0.3), persistent=False)

    def forward(self, inputs):
        features = self.symbol(inputs)
        for block in (*self.blocks, *self.often):
            features = features + self.scale * block(features)
        return self.tied(features.tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))

    def forward(self, inputs):
        return self.inner(inputs)


WIDE_PROBLEM = Problem(model=wide, optimizer="adam", batch_size=12, num_epochs=0.1)


@pytest.mark.parametrize(("word", "num_ranks"), [("zero", 3), ("fsdp", 3), ("fsdp:reshard=off", 2)])
def test_tied_layers_and_odd_sizes_train_as_in_one_process(ranks, word, num_ranks):
    problem = Problem(model=Blocks, accumulate=2, num_epochs=1)
    fits = ranks(num_ranks).call(by_strategy, word, problem)
    reference = by_hand(problem, num_ranks)
    assert all(distance(one, reference) < 1e-5 for one in fits)
    for mine, theirs in zip(fits[0].buffers, reference.buffers, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fsdp_sends_its_part_for_each_gather_and_scatter(ranks, accumulate):
    rows = {width: -(-width // 3) for _, width in WIDE}
    part = 4 * sum(rows[outputs] * (inputs + 1) for inputs, outputs in WIDE)
    problem = replace(WIDE_PROBLEM, accumulate=accumulate)
    for word, num_gathers in (("fsdp", 2 * accumulate), ("fsdp:reshard=off", accumulate)):
        for one in ranks(3).call(by_strategy, word, problem):
            assert one.reports[0].num_bytes_sent == 2 * part * (num_gathers + 1)


def test_layers_are_what_is_called_by_itself_and_shares_nothing():
    model = Blocks()
    assert set(gathered_layers(model)) == {*model.blocks[1:], model.often[1], model.tied[2][0]}
    transformer = text.Transformer()
    assert set(gathered_layers(transformer)) == {*transformer.layers, *transformer.last}
