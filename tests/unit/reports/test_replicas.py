"""A replica check turns digests into verdicts, differences, causes and a table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import CHUNK_ELEMENTS, Part
from ddpnb.rank.inspection import digests as on_rank
from ddpnb.reports.inspection.replicas import (
    PartVerdict,
    ReplicaCheck,
    findings_of,
    with_causes,
    with_size,
)

Namespace = dict[str, Any]


def checked(namespaces: Sequence[Namespace], *names: str, **facts: object) -> ReplicaCheck:
    """Compare the ranks' namespaces in this process, like the session compares real ranks."""
    replicas = []
    for rank, namespace in enumerate(namespaces):
        found = on_rank.replica(names, namespace, rank=rank)
        held = {name: replace(each, **facts) for name, each in found.held.items()}
        replicas.append(replace(found, held=held))
    findings = []
    for each in findings_of(replicas):
        if each.chunks:
            wanted = each.name, each.part, each.tensor, each.chunks
            values = [on_rank.elements(namespaces[r], *wanted) for r in each.measured_ranks]
            each = with_size(each, values)
        findings.append(each)
    ranks = tuple(range(len(namespaces)))
    return ReplicaCheck(findings=with_causes(findings, replicas), ranks=ranks)


def trained(seed: int = 0, data_seed: int = 0, num_steps: int = 1) -> Namespace:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(data_seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).pow(2).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def cause(result: ReplicaCheck, part: Part) -> str:
    return next(each.cause for each in result.findings if each.part is part)


def test_equal_replicas_are_the_same():
    result = checked([trained(), trained()])
    assert {each.verdict for each in result.findings} == {PartVerdict.SAME}
    assert "all ranks train on the same samples" in cause(result, Part.GRADIENTS)


def test_the_first_difference_is_named_with_its_size():
    namespaces = [trained(), trained(), trained()]
    with torch.no_grad():
        weight = namespaces[1]["model"][2].weight
        weight[0, :3] += 0.25
    result = checked(namespaces, "model")
    finding = next(each for each in result.findings if each.part is Part.PARAMETERS)
    assert (finding.num_different, finding.num_tensors) == (1, 6)
    assert finding.groups == ((0, 2), (1,))
    assert (finding.tensor, finding.num_unequal, finding.num_elements) == ("2.weight", 3, 16)
    assert finding.largest == pytest.approx(0.25)
    shown = "2.weight: ranks 0,2 against rank 1, 3 of 16 elements: at most 0.25 apart"
    assert shown in result.text()
    assert shown in result.table().html()


def test_causes():
    assert "drew its own initial weights" in cause(
        checked([trained(seed, num_steps=0) for seed in (0, 1)], "model"), Part.PARAMETERS
    )
    apart = [trained(data_seed=seed) for seed in (0, 1)]
    result = checked(apart, "model", "optimizer")
    assert "The gradients are not averaged" in cause(result, Part.PARAMETERS)
    assert "own samples" in cause(result, Part.GRADIENTS)
    assert "Rank 0's statistics are not sent" in cause(result, Part.BUFFERS)
    assert "The gradients differ" in cause(result, Part.STATE)
    skipped = [trained(num_steps=3), trained(num_steps=2)]
    text = "A rank skipped a step. Number of steps of optimizer: 2 on rank 1 and 3 on rank 0."
    assert cause(checked(skipped, "model"), Part.PARAMETERS) == text  # the optimizer was not named
    namespaces = [trained(), trained()]
    namespaces[1]["model"].zero_grad()
    assert "Rank 1 ran no backward pass" in cause(checked(namespaces, "model"), Part.GRADIENTS)


def test_what_ddp_leaves_apart_by_design_is_no_fault():
    namespaces = [trained(), trained()]
    namespaces[1]["model"][1].running_mean += 1
    result = checked(namespaces, "model", is_ddp=True, syncs_buffers=True)
    assert result.is_same
    assert result.sentence().endswith("; buffers of model differ by design.")
    without = checked(namespaces, "model", is_ddp=True, syncs_buffers=False)
    assert not without.is_same
    assert "broadcast_buffers=False" in cause(without, Part.BUFFERS)
    namespaces[1]["model"][0].weight.grad += 1e-7
    result = checked(namespaces, "model", is_ddp=True)
    assert "rounding" in cause(result, Part.GRADIENTS)


def test_tensors_of_any_kind():
    same = {
        "none": torch.empty(0),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "nan": torch.tensor([float("nan")]),
        "turned": torch.arange(6).reshape(2, 3).T,
        "zero": torch.tensor([0.0]),
    }
    assert checked([{"d": same}, {"d": {**same, "zero": torch.tensor([-0.0])}}], "d").is_same
    for one, other, said in (
        (torch.ones(3), torch.tensor([1.0, 2, 1]), "rank 1, 1 of 3 elements: at most 1 apart"),
        (torch.zeros(2), torch.zeros(3), "float32 [2] on rank 0 and float32 [3] on rank 1"),
        (torch.ones(1), torch.tensor([float("nan")]), "some values are NaN or infinite"),
    ):
        assert said in checked([{"t": one}, {"t": other}], "t").text()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2, device="meta").weight,
        lambda: nn.LazyLinear(2).weight,
        lambda: torch.eye(3).to_sparse(),
    ],
)
def test_what_has_no_plain_values_is_not_compared(make):
    (finding,) = checked([{"t": make()}, {"t": make()}], "t").findings
    assert finding.verdict is PartVerdict.UNKNOWN


def test_a_large_tensor_is_measured_in_part_and_says_so():
    size = 40 * CHUNK_ELEMENTS
    other = torch.zeros(size)
    other[3 * CHUNK_ELEMENTS] = 2.0
    only = checked([{"t": torch.zeros(size)}, {"t": other}], "t")
    assert "1 of 65,536 elements measured, of 2,621,440: at most 2 apart" in only.text()


@pytest.mark.parametrize(
    ("name", "named"),
    [("modle", "did you mean model"), ("model", "model is an int"), ("x[0]", "IndexError")],
)
def test_nothing_to_compare_is_one_sentence(name, named):
    with pytest.raises(UserError, match=named):
        on_rank.replica((name,), {"model": 1, "x": []}, rank=0)


def test_nothing_changes():
    namespace = trained()
    names, optimizer = set(namespace), namespace["optimizer"]
    weight, added = namespace["model"][0].weight, nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [added]})
    version, state, grad = weight._version, torch.get_rng_state(), weight.grad.clone()
    on_rank.replica((), namespace, rank=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weight.grad, grad)
    assert (weight._version, set(namespace)) == (version, names)
    assert added not in optimizer.state
