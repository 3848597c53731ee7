"""Does an inspection say what was sent, and does it leave everything as it was?"""

import copy
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.connections import bytes_sent
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RankState
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.inspect import ddp_steps, machine, subject
from tests.rank.ranks import make_state

LOSS = "nn.functional.cross_entropy(output, y)"


class Net(nn.Module):
    """Has a parameter that no loss depends on, buffers, and a dropout."""

    def __init__(self, *, has_unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu_()))


def namespace_of(state: RankState, *, is_ddp: bool, has_unused: bool) -> dict[str, Any]:
    """A model with gradients, unless a parameter of it has none."""
    torch.manual_seed(0)
    model: nn.Module = Net(has_unused=has_unused)
    if is_ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    torch.manual_seed(state.rank)
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    if not has_unused:
        nn.functional.cross_entropy(model(x), y).backward()
    return {"model": model, "x": x, "y": y, "nn": nn}


def everything(names: dict[str, Any]) -> list[torch.Tensor]:
    model = names["model"]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return copy.deepcopy([*model.state_dict().values(), *grads, names["x"], torch.get_rng_state()])


def inspected(
    state: RankState, folder: Path, is_ddp: bool, has_unused: bool, given: dict[str, Any]
) -> Any:
    names = namespace_of(state, is_ddp=is_ddp, has_unused=has_unused)
    spec = InspectSpec(inspection_id="i", **({"model": "model", "batch": "x"} | given))
    before, sent = everything(names), bytes_sent()
    found = subject.find(spec, state, names)
    report = ddp_steps.measure(
        spec,
        state,
        names,
        finds_unused=bool(found.unused),
        folder=folder,
        cancellation=CancellationToken(),
    )
    num_sent = (bytes_sent() or 0) - (sent or 0)
    assert all(map(torch.equal, before, everything(names)))
    assert not list(folder.glob("*.link"))
    return found, report, num_sent


@pytest.mark.parametrize("is_ddp", [False, True])
def test_the_buckets_carry_the_gradients_and_nothing_changes(ranks, is_ddp: bool):
    given = {"loss": LOSS, "bucket_caps": (0.0001,)}
    for rank, (found, report, _) in enumerate(ranks(2).call(inspected, is_ddp, False, given)):
        total = sum(each.num_bytes for each in found.parameters)
        assert [each.cap_mb for each in report.caps] == [0.01 if is_ddp else 25.0, 0.0001]
        assert [len(cap.buckets) for cap in report.caps] == [1, 3]
        for cap in report.caps:
            assert sum(bucket.num_bytes for bucket in cap.buckets) == total
            assert set(cap.ready_seconds) == {each.name for each in found.parameters}
            assert len(cap.steps) >= 3
            for step in cap.steps:
                sent = [s for s in step if s.name.startswith("bucket")]
                assert [s.num_bytes for s in sent] == [each.num_bytes for each in cap.buckets]
                assert {(s.rank, s.group) for s in sent} == {(rank, (0, 1))}
                names = [s.name for s in step if s.lane == "compute"]
                assert (names[:2], names[-1]) == (["forward", "backward"], "update")


@pytest.mark.skipif(not psutil.LINUX, reason="Linux alone counts what connections send")
def test_the_traced_bytes_are_those_on_the_sockets(ranks):
    given = {"model": "nn.Linear(300, 300)", "batch": "x.new_ones(4, 300)"}
    answers = ranks(2).call(inspected, False, False, given)
    (cap,) = answers[0][1].caps
    (size,) = {sum(s.num_bytes or 0 for s in step) for step in cap.steps}
    assert size == 4 * (300 * 300 + 300)
    num_steps = ddp_steps.NUM_WARMUP_STEPS + len(cap.steps)
    by_formula = num_steps * 2 * size + size  # rank 0 sends the weights; each its gradients once
    assert by_formula <= sum(sent for _, _, sent in answers) <= 1.02 * by_formula + 100_000


def test_unused_parameters_are_found_and_an_emulated_link_makes_buckets_late(ranks):
    for found, report, _ in ranks(2).call(inspected, False, True, {"link": "100Mbit,1ms"}):
        assert found.unused == ("unused.weight", "unused.bias")
        spans = [s for step in report.caps[0].steps for s in step if s.name.startswith("bucket")]
        assert min(s.seconds for s in spans) >= 2e-3  # two messages around the ring


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "net"}, "net is not defined"),
        ({"model": "x"}, "x is a Tensor"),
        ({"batch": "x[:, :3]"}, "model .*RuntimeError"),
        ({"loss": "output"}, r"\(6, 4\)"),
        ({"model": "nn.ReLU()"}, "does not depend"),
        ({"batch": "1 / 0"}, "1 / 0 .*ZeroDivisionError"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, str], named: str):
    state = make_state(0, 2)
    names = namespace_of(state, is_ddp=False, has_unused=False)
    spec = InspectSpec(inspection_id="i", **({"model": "model", "batch": "x"} | given))
    with pytest.raises(UserError, match=named):
        subject.find(spec, state, names)


def measured(state: RankState, folder: Path) -> Any:
    return machine.measure(state, folder, CancellationToken())


def test_a_machine_is_measured(ranks):
    first, second = ranks(2).call(measured)
    assert first.flops_alone > 0 == second.flops_alone
    assert first.has_peer_access is None
    for each in (first, second):
        assert min(each.flops, each.latency, each.all_reduce, each.shared_all_reduce) > 0
