"""Does an inspection of DDP say what was sent, and does it leave everything as it was?"""

import contextlib
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RankState, RunSpec
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.trace import data_parallel_steps, ddp_steps, subject


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


def namespace_of(state: RankState, wrapped: bool, has_unused: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = Net(has_unused=has_unused)
    if wrapped:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    torch.manual_seed(state.rank)
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "x": x, "y": y, "nn": nn, "optimizer": optimizer, "rank": state.rank}


def inspected(
    state: RankState, folder: Path, spec: InspectSpec, wrapped: bool, unused: bool
) -> Any:
    names = namespace_of(state, wrapped, unused)
    if not unused:
        nn.functional.cross_entropy(names["model"](names["x"]), names["y"]).backward()
        names["optimizer"].step()
    before = everything(names)
    found = subject.find(spec, state, names)
    report = ddp_steps.measure(
        spec,
        state,
        names,
        finds_unused=bool(found.unused),
        folder=folder,
        cancellation=CancellationToken(),
    )
    same = [torch.equal(*pair) for pair in zip(before, everything(names), strict=True)]
    return found, report, all(same), [path.name for path in folder.iterdir()]


def everything(names: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = names["model"], names["optimizer"]
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    held = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    state = [each.clone() for each in model.state_dict().values()]
    return [*state, *grads, *held, names["x"].clone(), torch.get_rng_state()]


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_traced_bytes_are_those_of_the_gradients_and_nothing_changes(ranks, wrapped: bool):
    loss = "nn.functional.cross_entropy(output, y)"
    spec = spec_of(loss=loss, optimizer="optimizer", bucket_caps=(0.0001,))
    for rank, answer in enumerate(ranks(2).call(inspected, spec, wrapped, False)):
        found, report, is_same, _ = answer
        assert is_same
        total = sum(each.num_bytes for each in found.parameters)
        assert [each.cap_mb for each in report.caps] == [0.01 if wrapped else 25.0, 0.0001]
        for cap in report.caps:
            assert sum(bucket.num_bytes for bucket in cap.buckets) == total
            assert set(cap.ready_seconds) == {each.name for each in found.parameters}
            assert len(cap.steps) >= 3
            for step in cap.steps:
                sent = [s for s in step if s.name.startswith("bucket")]
                assert len(sent) == len(cap.buckets)
                assert sum(s.num_bytes for s in sent) == total
                assert all(s.rank == rank and s.group == (0, 1) for s in sent)
                names = [s.name for s in step if s.lane == "compute"]
                assert names[:2] == ["forward", "backward"]
                assert names[-1] == "update"
        assert [len(cap.buckets) for cap in report.caps] == [1, 3]
        assert found.held["optimizer"] == found.held["gradients"] == total


def test_unused_parameters_are_found_and_an_emulated_link_leaves_no_file(ranks):
    spec = spec_of(loss="nn.functional.cross_entropy", link="100Mbit,1ms")
    for found, report, is_same, files in ranks(2).call(inspected, spec, False, True):
        assert is_same
        assert found.unused == ("unused.weight", "unused.bias")
        spans = [s for step in report.caps[0].steps for s in step if s.name.startswith("bucket")]
        assert min(s.seconds for s in spans) >= 2e-3  # two messages around the ring
        assert not [name for name in files if name.endswith(".link")]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "net"}, "net is not defined: define it in a %%ddp cell."),
        ({"model": "x"}, "x is a Tensor and no model, an nn.Module."),
        ({"model": "nn.ReLU()", "batch": "x"}, "has no parameter that needs a gradient"),
        ({"batch": "x[:, :3]"}, "model on the batch x\\[:, :3\\] fails: RuntimeError"),
        ({"loss": "output"}, "The loss is a tensor of shape \\(6, 4\\)"),
        ({"loss": "output.detach().sum()"}, "does not depend on any parameter"),
        ({"batch": "1 / 0"}, "1 / 0 fails: ZeroDivisionError"),
        ({"optimizer": "x"}, "x is a Tensor and no torch optimizer"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, str], sentence: str):
    state = RankState(
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
    names = namespace_of(state, wrapped=False, has_unused=False)
    with pytest.raises(UserError, match=sentence):
        subject.find(spec_of(**given), state, names)


def divided(state: RankState, folder: Path) -> Any:
    if state.rank != 0:
        return None
    task = RunSpec(run_id="d", strategy="dp", task="digits", batch_size=30, momentum=0.9)
    return data_parallel_steps.measure(
        InspectSpec(inspection_id="d", task=task),
        state,
        {},
        folder=folder,
        cancellation=CancellationToken(),
        filename="<cell>",
        cache=None,
    )


def test_data_parallel_cuts_the_batch_and_the_first_device_holds_more(ranks):
    report, *_ = ranks(3).call(divided)
    assert report.num_samples == 30
    assert [each.num_samples for each in report.devices] == [10, 10, 10]
    first, *others = report.devices
    assert {s.name for s in first.spans} >= {"parameters out", "outputs gathered", "gradients in"}
    assert all({s.name for s in each.spans} == {"forward", "backward"} for each in others)
    assert all(sum(first.held.values()) > sum(each.held.values()) for each in others)
    assert first.held["optimizer"] == first.held["parameters"] == first.held["gradients"]
    assert first.held["batch"] == 3 * others[0].held["batch"] + 30 * 8  # class numbers, int64
    assert first.held["outputs"] == 3 * others[0].held["outputs"]


def on_the_sockets(state: RankState, folder: Path) -> tuple[int, Any]:
    torch.manual_seed(0)
    names = {"model": nn.Linear(300, 300), "x": torch.randn(4, 300)}
    before = bytes_sent()
    report = ddp_steps.measure(
        spec_of(batch="x"),
        state,
        names,
        finds_unused=False,
        folder=folder,
        cancellation=CancellationToken(),
    )
    return bytes_sent() - before, report


def bytes_sent() -> int:
    """What all TCP connections of this process have sent: ``tcpi_bytes_sent`` of Linux."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copied:
                info = copied.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                total += struct.unpack_from("<Q", info, 200)[0]
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts for each connection")
def test_the_traced_bytes_are_those_on_the_sockets(ranks):
    answers = ranks(2).call(on_the_sockets)
    (cap,) = answers[0][1].caps
    traced = {sum(s.num_bytes or 0 for s in step) for step in cap.steps}
    assert traced == {4 * (300 * 300 + 300)}
    (size,) = traced
    num_steps = 2 * (ddp_steps.NUM_WARMUP_STEPS + len(cap.steps))  # as many without hooks
    by_formula = num_steps * 2 * size  # an all-reduce of two ranks: each sends its size once
    wrapping = 2 * size  # rank 0 sends the weights of two copies
    counted = sum(num for num, _ in answers)
    assert by_formula + wrapping <= counted <= 1.02 * (by_formula + wrapping) + 100_000
