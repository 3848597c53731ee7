"""Does a rank that keeps a part keep only that, and report what it sends?"""

import json
import math
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json

from ddpnb.rank.strategies.fsdp import layers_of
from ddpnb.rank.tasks import text
from tests.rank import fit
from tests.rank.fit import Problem, by_hand, by_strategy, distance

WIDE = [(6, 96), *[(96, 96)] * 6, (96, 3)]
"""Inputs and outputs of the layers of a model that can be cut evenly."""


class WideProblem(Problem):
    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in WIDE))


class GroupedProblem(Problem):
    """Weights decay, biases do not and learn faster: two groups of the task's own."""

    def factory(self):
        def make(parameters):
            weights = [p for p in parameters if p.ndim > 1]
            biases = [p for p in parameters if p.ndim == 1]
            groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
            return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

        return make


class TiedProblem(Problem):
    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return StaleVariable()


class StaleVariable(nn.Module):
    """One layer used twice, in no ``Sequential``, with a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.same = self.layer
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, inputs):
        return self.last(self.same(self.layer(inputs)) * self.scale)


class FrozenProblem(Problem):
    """Between two layers that are trained one is frozen; of the last, only the bias is trained."""

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 6), Biased()
        )


class Biased(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.weight.requires_grad_(False)


class BlocksProblem(Problem):
    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Blocks()


class Blocks(nn.Module):
    """Blocks in lists, of which one is used twice, and weights tied in and across them."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.often = nn.ModuleList([self.blocks[0], nn.Linear(6, 6), nn.Identity()])
        self.tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 3)))
        self.tied[0].weight = self.symbol.weight

    def forward(self, inputs):
        features = self.symbol(inputs)
        for block in (*self.blocks, *self.often):
            features = features + 0.3 * block(features)
        return self.tied(features.tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))

    def forward(self, inputs):
        return self.inner(inputs)


WIDE_PROBLEM = WideProblem(optimizer="adam", batch_size=12, num_epochs=1)
PROBLEMS = [
    GroupedProblem(),
    TiedProblem(),
    BlocksProblem(accumulate=2),
    FrozenProblem(),
    WIDE_PROBLEM,
]
S = 4 * sum(inputs * outputs + outputs for inputs, outputs in WIDE)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_the_optimizer_are_an_nth(ranks, num_ranks):
    ddp, zero, fsdp = (
        [one.memory for one in ranks(num_ranks).call(by_strategy, word, WIDE_PROBLEM)]
        for word in ("ddp", "zero", "fsdp")
    )
    assert all(memory.parameters == S for memory in (*ddp, *zero))
    assert all(2 * S <= memory.optimizer < 2.01 * S for memory in ddp)  # Adam's two moments
    assert sum(memory.optimizer for memory in zero) == pytest.approx(2 * S, rel=0.01)
    assert max(memory.optimizer for memory in zero) < 2 * S * 1.2 / num_ranks
    assert sum(memory.parameters for memory in fsdp) == S
    assert max(memory.parameters for memory in fsdp) < 1.01 * S / num_ranks
    assert max(memory.optimizer for memory in fsdp) < 1.02 * 2 * S / num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("word", ["zero", "fsdp", "fsdp:reshard=off"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_groups_tied_layers_and_odd_sizes_train_as_in_one_process(ranks, word, num_ranks, problem):
    fits = ranks(num_ranks).call(by_strategy, word, problem)
    reference = by_hand(problem, num_ranks)
    assert all(distance(one, reference) < 1e-5 for one in fits)
    for mine, theirs in zip(fits[0].buffers, reference.buffers, strict=True):
        torch.testing.assert_close(mine, theirs)


def clipped_and_warmed(parameters):
    """An optimizer with both hooks of the worker's: the rate grows, gradients are cut."""
    made = fit.clipped(partial(torch.optim.SGD, lr=0.1, momentum=0.9), 0.3, parameters)
    made.num_updates = 0

    def warm_up(optimizer, *_):
        made.num_updates += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, made.num_updates / 10)

    made.register_step_pre_hook(warm_up)
    return made


class TunedProblem(Problem):
    def factory(self):
        return clipped_and_warmed


@pytest.mark.parametrize("word", ["zero", "fsdp"])
def test_hooks_of_the_optimizer_see_all_gradients_once_a_step(ranks, word):
    fits = ranks(2).call(by_strategy, word, TunedProblem())
    assert all(distance(one, by_hand(TunedProblem(), 2)) < 1e-5 for one in fits)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_zero_sends_gradients_to_all_and_each_part_to_all_others(ranks, num_ranks):
    fits = ranks(num_ranks).call(by_strategy, "zero", WIDE_PROBLEM)
    per_step = sum(one.reports[0].traffic.sent for one in fits)
    others = num_ranks - 1
    assert per_step == num_ranks * (2 * others * S // num_ranks) + others * S


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_fsdp_sends_its_part_for_each_gather_and_scatter(ranks, num_ranks, accumulate):
    rows = {width: -(-width // num_ranks) for _, width in WIDE}
    part = 4 * sum(rows[outputs] * (inputs + 1) for inputs, outputs in WIDE)
    problem = replace(WIDE_PROBLEM, accumulate=accumulate)
    for word, num_gathers in (("fsdp", 2 * accumulate), ("fsdp:reshard=off", accumulate)):
        for one in ranks(num_ranks).call(by_strategy, word, problem):
            assert one.reports[0].traffic.sent == (num_ranks - 1) * part * (num_gathers + 1)


@pytest.mark.parametrize("word", ["fsdp", "fsdp:reshard=off"])
def test_fsdp_sends_no_gradients_of_what_is_frozen(ranks, word):
    num_gathers = 1 if "off" in word else 2
    all_values = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 6 + 6 + 3 * 6 + 3
    trained = 6 * 8 + 8 + 8 * 6 + 6 + 3
    odd = [(6 + 1) * num_gathers, 1]  # three rows in two parts: one more is sent each time
    for one in ranks(2).call(by_strategy, word, FrozenProblem()):
        num_values = (all_values * num_gathers + trained + sum(odd)) / 2
        assert {report.traffic.sent for report in one.reports} == {4 * num_values}


def test_layers_are_what_is_called_by_itself_and_shares_nothing():
    model = Blocks()
    assert set(layers_of(model)) == {*model.blocks[1:], model.often[1], model.tied[2][0]}
    assert layers_of(StaleVariable()) == []
    transformer = text.Transformer()
    assert set(layers_of(transformer)) == {*transformer.layers, *transformer.last}


def test_a_list_inside_a_layer_stays_with_it():
    inner = nn.Linear(3, 3)
    outer = nn.Sequential(inner)
    outer.add_module("holder", Holder(held := nn.ModuleList([nn.Linear(3, 3)])))
    found = layers_of(outer)
    assert set(found) == {inner, outer.holder}
    assert held[0] not in found


class Holder(nn.Module):
    def __init__(self, held: nn.ModuleList) -> None:
        super().__init__()
        self.held = held

    def forward(self, inputs):
        return self.held[0](inputs)


@pytest.mark.parametrize("word", ["fsdp", "fsdp:reshard=off"])
@pytest.mark.parametrize(
    "problem",
    [
        BlocksProblem(num_epochs=1),
        BlocksProblem(accumulate=2),
        FrozenProblem(),
        Problem(model="frozen"),
        Problem(model="frozen", accumulate=3),
    ],
)
def test_fsdp_reports_what_torch_has_sent(ranks, word, problem):
    for reported, recorded in ranks(2).call(reported_and_recorded, word, problem):
        assert reported == recorded > 0


def reported_and_recorded(state, folder, word, problem) -> tuple[int, int]:
    """What a strategy says that it sent, and what the gathers and scatters of torch take."""
    since = time.time_ns()
    fit = by_strategy(state, folder, word, replace(problem, num_epochs=0.5))
    entries = json.loads(_dump_fr_trace_json())["entries"]
    parts = [values_of_a_part(e, state.world_size) for e in entries if e["time_created_ns"] > since]
    for_the_end = [-(-len(p) // state.world_size) * p[0].numel() for p in fit.parameters]
    recorded = (state.world_size - 1) * 4 * (sum(parts) - sum(for_the_end))
    return sum(report.traffic.sent for report in fit.reports), recorded


def values_of_a_part(entry, num_parts: int) -> int:
    """Gloo makes a reduce-scatter of an all-reduce, of all parts."""
    num_values = math.prod(entry["input_sizes"][0])
    return num_values // num_parts if "reduce" in entry["profiling_name"] else num_values
