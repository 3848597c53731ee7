"""Does an inspection say what was sent and held, and does it leave everything as it was?"""

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
from ddpnb.protocol.machine import MachineQuery
from ddpnb.protocol.messages import RankState, RunSpec
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.inspect import ddp_steps, dp_steps, links, machine, subject

LOSS = "nn.functional.cross_entropy(output, y)"


class Net(nn.Module):
    """Has a parameter that no loss depends on, buffers, and a dropout."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu_()))


def spec_of(**given: Any) -> InspectSpec:
    return InspectSpec(inspection_id="i", **({"model": "model", "batch": "x, y"} | given))


def namespace_of(state: RankState, *, is_ddp: bool, has_unused: bool) -> dict[str, Any]:
    """A model that has made a step, unless a parameter of it has no gradient."""
    torch.manual_seed(0)
    model: nn.Module = Net(has_unused=has_unused)
    if is_ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    torch.manual_seed(state.rank)
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not has_unused:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"model": model, "x": x, "y": y, "nn": nn, "optimizer": optimizer}


def everything(names: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = names["model"], names["optimizer"]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    held = [s["momentum_buffer"] for s in optimizer.state.values()]
    state = [*model.state_dict().values(), *grads, *held, names["x"], torch.get_rng_state()]
    return copy.deepcopy([each.detach() for each in state])


def inspected(
    state: RankState, folder: Path, spec: InspectSpec, is_ddp: bool = False, unused: bool = False
) -> Any:
    names = namespace_of(state, is_ddp=is_ddp, has_unused=unused)
    before, sent = everything(names), bytes_sent()
    found = subject.find(spec, state, names)
    report = ddp_steps.measure(
        spec,
        state,
        names,
        finds_unused=bool(found.unused),
        cancellation=CancellationToken(),
    )
    num_sent = (bytes_sent() or 0) - (sent or 0)
    assert all(map(torch.equal, before, everything(names)))
    return found, report, num_sent


@pytest.mark.parametrize("is_ddp", [False, True])
def test_the_buckets_carry_the_gradients_and_nothing_changes(ranks, is_ddp: bool):
    spec = spec_of(loss=LOSS, optimizer="optimizer", bucket_caps=(0.0001,))
    for rank, (found, report, _) in enumerate(ranks(2).call(inspected, spec, is_ddp)):
        total = sum(each.num_bytes for each in found.parameters)
        assert [each.cap_mb for each in report.caps] == [0.01 if is_ddp else 25.0, 0.0001]
        assert [len(cap.buckets) for cap in report.caps] == [1, 3]
        assert found.held["optimizer"] == found.held["gradients"] == total
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
    spec = spec_of(model="nn.Linear(300, 300)", batch="x.new_ones(4, 300)")
    answers = ranks(2).call(inspected, spec)
    (cap,) = answers[0][1].caps
    (size,) = {sum(s.num_bytes or 0 for s in step) for step in cap.steps}
    assert size == 4 * (300 * 300 + 300)
    num_steps = subject.NUM_WARMUP_STEPS + len(cap.steps)
    by_formula = num_steps * 2 * size + size  # rank 0 sends the weights; each its gradients once
    assert by_formula <= sum(sent for _, _, sent in answers) <= 1.02 * by_formula + 100_000


def test_unused_parameters_are_found_and_an_emulated_link_makes_buckets_late(ranks):
    spec = spec_of(loss="nn.functional.cross_entropy", link="100Mbit,1ms")
    for found, report, _ in ranks(2).call(inspected, spec, False, True):
        assert found.unused == ("unused.weight", "unused.bias")
        spans = [s for step in report.caps[0].steps for s in step if s.name.startswith("bucket")]
        assert min(s.seconds for s in spans) >= 2e-3  # two messages around the ring


ALONE = RankState(
    rank=0,
    local_rank=0,
    world_size=2,
    pid=0,
    host="here",
    device="cpu",
    device_name="CPU",
    num_threads=1,
    backend="gloo",
)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "net"}, "net is not defined"),
        ({"model": "x"}, "x is a Tensor"),
        ({"model": "nn.ReLU()", "batch": "x"}, "no parameter"),
        ({"batch": "x[:, :3]"}, "model .*RuntimeError"),
        ({"loss": "output"}, r"\(6, 4\)"),
        ({"loss": "output.detach().sum()"}, "does not depend"),
        ({"loss": "None"}, "None"),
        ({"batch": "1 / 0"}, "1 / 0 .*ZeroDivisionError"),
        ({"optimizer": "x"}, "x is a Tensor"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, str], named: str):
    names = namespace_of(ALONE, is_ddp=False, has_unused=False)
    with pytest.raises(UserError, match=named):
        subject.find(spec_of(**given), ALONE, names)


def divided(state: RankState, folder: Path) -> Any:
    task = RunSpec(run_id="d", strategy="dp", task="digits", batch_size=30, momentum=0.9)
    spec = InspectSpec(inspection_id="d", task=task)
    return None if state.rank else dp_steps.measure(spec, state, {}, filename="<cell>")


def test_data_parallel_cuts_the_batch_and_the_first_device_holds_more(ranks):
    report, *_ = ranks(3).call(divided)
    assert report.num_samples == 30
    assert [each.num_samples for each in report.devices] == [10, 10, 10]
    first, *others = report.devices
    assert {s.name for s in first.spans} >= {"forward", "backward", "update", *dp_steps.SENT}
    assert all({s.name for s in each.spans} == {"forward", "backward"} for each in others)
    assert first.held["optimizer"] == first.held["parameters"] == first.held["gradients"]
    assert first.held["batch"] == 3 * others[0].held["batch"] + 30 * 8  # class numbers, int64
    assert first.held["outputs"] == 3 * others[0].held["outputs"]
    assert first.held["activations"] == others[0].held["activations"] > 0


def linked(state: RankState, folder: Path) -> Any:
    return links.measure((0, 1), torch.device("cpu"))


def test_messages_are_timed_between_each_pair(ranks):
    (first, second) = ((each,) for (each,) in ranks(2).call(linked))
    assert [each[:2] for each in (*first, *second)] == [(0, 1), (1, 0)]
    for _, _, latency, rate in (*first, *second):
        assert 0 < latency < 1 < rate


def measured(state: RankState, folder: Path) -> Any:
    names = namespace_of(state, is_ddp=False, has_unused=False)
    query = MachineQuery(model="model", input="x", name="m")
    before = everything(names)
    found = machine.measure(query, state, folder, CancellationToken(), names)
    assert all(map(torch.equal, before[:-1], everything(names)[:-1]))  # but for random numbers
    return found


def test_a_machine_is_measured_with_a_model(ranks):
    first, second = ranks(2).call(measured)
    assert first.flops_alone > 0 == second.flops_alone
    assert first.has_peer_access is None
    for each in (first, second):
        assert min(each.flops, each.latency, each.all_reduce, each.shared_all_reduce) > 0
        assert (each.model.num_samples, each.model.num_fewer) == (6, 3)
        assert each.model.num_bytes == 4 * each.model.num_parameters
