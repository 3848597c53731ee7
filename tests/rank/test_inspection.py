"""An inspection reports the bytes of each bucket, and changes no tensor and no random state."""

import copy
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.protocol.devices import parse_devices
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.messages import RankState
from ddpnb.rank.clock import Clock
from ddpnb.rank.inspection import ddp_steps
from ddpnb.rank.training.run import Surroundings
from tests.rank.ranks import make_state


class Net(nn.Module):
    """A model with buffers and a dropout, and with an unused layer if it is not for DDP."""

    def __init__(self, *, is_ddp: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.unused = None if is_ddp else nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu_()))


def namespace_of(state: RankState, *, is_ddp: bool) -> dict[str, Any]:
    model: nn.Module = Net(is_ddp=is_ddp)
    if is_ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    torch.manual_seed(state.rank)
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    nn.functional.cross_entropy(model(x), y).backward()
    return {"model": model, "x": x, "y": y, "nn": nn}


def everything(names: dict[str, Any]) -> list[torch.Tensor]:
    grads = [p.grad for p in names["model"].parameters() if p.grad is not None]
    state = names["model"].state_dict().values()
    return copy.deepcopy([*state, *grads, names["x"], torch.get_rng_state()])


def spec_of(given: dict[str, Any]) -> InspectSpec:
    return InspectSpec(**({"model": "model", "batch": "x"} | given))


def inspected(state: RankState, folder: Path, is_ddp: bool, given: dict[str, Any]) -> Any:
    names, spec = namespace_of(state, is_ddp=is_ddp), spec_of(given)
    before = everything(names)
    here = Surroundings(state=state, namespace=names, folder=folder)
    shapes, unused = ddp_steps.check_model_here(spec, here)
    spec = replace(spec, finds_unused=bool(unused))
    report = ddp_steps.measure(spec, here)
    assert all(map(torch.equal, before, everything(names)))
    return shapes, unused, report


@pytest.mark.parametrize("is_ddp", [False, True])
def test_the_buckets_carry_the_gradients_and_nothing_changes(ranks, is_ddp: bool):
    given = {"loss": "nn.functional.cross_entropy(output, y)", "bucket_caps": (0.0001,)}
    for rank, (shapes, unused, report) in enumerate(ranks(2).call(inspected, is_ddp, given)):
        assert unused == (() if is_ddp else ("unused.weight", "unused.bias"))
        sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
        assert [each.cap_mb for each in report] == [0.01 if is_ddp else 25.0, 0.0001]
        assert [len(cap.buckets) for cap in report] == [1, 3 if is_ddp else 4]
        for cap in report:
            assert sum(bucket.num_bytes for bucket in cap.buckets) == sum(sizes.values())
            assert set(cap.ready_seconds) == set(sizes) - set(unused)
            assert len(cap.steps) >= 3
            for step in cap.steps:
                sent = [s for s in step if s.name.startswith("bucket")]
                assert [s.num_bytes for s in sent] == [each.num_bytes for each in cap.buckets]
                assert {(s.rank, s.group) for s in sent} == {(rank, (0, 1))}
                names = [s.name for s in step if s.lane == "compute"]
                assert (names[:2], names[-1]) == (["forward", "backward"], "update")


def test_a_bucket_takes_its_messages_on_emulated_devices(ranks):
    devices = parse_devices("2", compute="1ms/sample", link="1Gbit,1ms")
    given = {"model": "nn.Linear(300, 300)", "batch": "x.new_ones(4, 300)", "devices": devices}
    (cap,) = ranks(2).call(inspected, True, given)[0][2]
    (step,) = cap.steps
    spans = {span.name: span for span in step}
    assert spans["backward"].seconds == pytest.approx(4e-3 * 2 / 3)
    assert spans["bucket 0"].seconds == pytest.approx(2 * (1e-3 + 4 * 90_300 / 2 * 8 / 1e9))


class Event(NamedTuple):
    """A CUDA event: a time on the GPU's clock, in milliseconds."""

    milliseconds: float

    def elapsed_time(self, ended: "Event") -> float:
        return ended.milliseconds - self.milliseconds


class GpuClock(Clock):
    """The clock of a GPU that has an hour of work queued whenever gloo's thread asks for a time."""

    def moment(self) -> Event:
        is_gloos = threading.current_thread() is not threading.main_thread()
        return Event(1000 * (time.perf_counter() - 500 + 3600 * is_gloos))


def inspected_on_a_gpu(state: RankState, folder: Path) -> Any:
    with patch.object(ddp_steps, "MeasuredClock", lambda _: GpuClock()):
        return inspected(state, folder, True, {"bucket_caps": (0.0001,)})[1]


def test_over_gloo_a_bucket_of_a_gpu_ends_when_gloo_ends(ranks):
    for report in ranks(2).call(inspected_on_a_gpu):
        for span in (span for cap in report for step in cap.steps for span in step):
            assert 0 < span.seconds < 60, span


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "x"}, "x is a Tensor"),
        ({"batch": "x[:, :3]"}, "model .*RuntimeError"),
        ({"loss": "output"}, r"\(6, 4\)"),
        ({"model": "nn.ReLU()"}, "does not depend"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, str], named: str):
    state = make_state(0, 2)
    here = Surroundings(state=state, namespace=namespace_of(state, is_ddp=False))
    with pytest.raises(UserError, match=named):
        ddp_steps.check_model_here(spec_of(given), here)
