"""On emulated devices ddpnb computes the time. Everything else is the same as on real ranks."""

from itertools import pairwise

import pytest

from ddpnb.prediction.calibrate import calibrate
from ddpnb.prediction.model import step_seconds
from ddpnb.protocol.devices import MODELS, count_devices
from ddpnb.protocol.messages import RunSpec
from tests.rank import runs
from tests.rank.runs import losses, marks_of, steps_of, train_job
from tests.unit.prediction.machines import measured

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2, bias=False))

def data(split):
    x = torch.randn(96, 4)
    return x, (x.sum(dim=1) > 0).long()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""
S = 4 * (5 * 300 + 2 * 300)
FLAGS = 4 * 3 * 8 / 1e6
"""Seconds of one flag for each parameter."""
LATENCY = 0.003
TRANSFER = S * 8 / 1e6
"""Seconds that all parameters take over the link."""
PASS, SAMPLE = 0.002, 0.001


def spec_of(strategy: str, num_ranks: int, **changes) -> RunSpec:
    given = {
        "source": CELL,
        "num_epochs": 2,
        "batch_size": 24,
        "devices": str(num_ranks),
        "compute": "1ms/sample,2ms",
        "link": "1Mbit,3ms",
    }
    return runs.spec_of(strategy, **given | changes)


def ring(num_ranks: int, size: float = TRANSFER) -> float:
    return 2 * (num_ranks - 1) * (LATENCY + size / num_ranks)


def computing(num_ranks: int, num_samples: int = 24) -> float:
    return PASS + SAMPLE * num_samples / num_ranks


EXCHANGE = {
    ("single", 2): PASS + SAMPLE * 24 - computing(2),
    ("no-comm", 3): 0.0,
    ("ddp", 2): ring(2),
    ("ddp", 8): ring(8),
    ("ddp-by-hand", 3): ring(3, TRANSFER + FLAGS),
    ("ring-by-hand", 3): ring(3, TRANSFER + FLAGS),
    ("central", 3): 4 * (LATENCY + TRANSFER + FLAGS),
    ("gossip", 2): LATENCY + TRANSFER,
    ("dp", 3): 4 * LATENCY + 2 * TRANSFER + 3 * LATENCY + 2 * 8 * (16 + 8 + 8) * 8 / 1e6,
}
"""Seconds of a step's messages, which each strategy's file lists, by strategy and ranks."""


@pytest.mark.parametrize(("strategy", "num_ranks"), EXCHANGE)
def test_a_step_takes_what_its_messages_take(ranks, strategy, num_ranks):
    expected = computing(num_ranks) + EXCHANGE[strategy, num_ranks]
    found = last_seconds(ranks, spec_of(strategy, num_ranks), num_ranks)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_message_takes_the_link_between_its_two_ranks(ranks):
    spec = spec_of("gossip", 4, devices="4/2", device_link="1Gbit,1ms")
    ends = [step.seconds for step in steps_of(ranks(4).call(train_job, spec)[0])]
    found = {round(after - before, 4) for before, after in pairwise(ends)}
    links = (0.001 + TRANSFER / 1000, LATENCY + TRANSFER)
    assert found == {round(computing(4) + each, 4) for each in links}


def test_all_wait_for_the_slowest(ranks):
    found = last_seconds(ranks, spec_of("ddp", 2, slow=("1:3x", "1:4ms")), 2)
    assert found == pytest.approx(3 * computing(2) + 4e-3 + ring(2), rel=1e-3)


def last_seconds(ranks, spec: RunSpec, num_ranks: int) -> float:
    """Return the seconds of the last step, because DDP sends more in its first step."""
    before, last = steps_of(ranks(num_ranks).call(train_job, spec)[0])[-2:]
    return last.seconds - before.seconds


@pytest.mark.parametrize("strategy", ["async", "async:bound=0", "async:bound=2"])
def test_asynchronous_runs_are_the_same_to_the_bit(ranks, strategy):
    spec = spec_of(strategy, 3, slow=("1:3x",), jitter=0.2)
    first, second = (ranks(3).call(train_job, spec) for _ in range(2))
    assert losses(first[0])
    assert list(map(steps_of, first)) == list(map(steps_of, second))
    assert list(map(marks_of, first)) == list(map(marks_of, second))
    assert len(steps_of(first[0])) > len(steps_of(first[1])) or "bound" in strategy


PUBLISHED = {
    # https://github.com/pytorch/pytorch/blob/main/benchmarks/distributed/ddp/README.md
    ("ddp", "resnet50", "8xV100", 32): 0.930,
    ("ddp", "resnet101", "8xV100", 32): 0.904,
    ("ddp", "resnet50", "16xV100/2", 32): 0.930,
    ("ddp", "resnet101", "16xV100/2", 32): 0.904,
    # https://github.com/ray-project/ray/blob/008ec7dc/doc/source/raysgd/raysgd_pytorch.rst
    ("ddp", "resnet50", "4xV100", 128): 0.984,
    ("ddp", "resnet50", "8xV100", 128): 0.981,
    ("dp", "resnet50", "4xV100", 128): 0.906,
    ("dp", "resnet50", "8xV100", 128): 0.886,
}
"""The rate of N cards divided by N times the rate of one card, with equal samples per card.

Others measured these values. The emulated clock uses no figure of several cards."""
MANY = CELL.replace("randn(96, 4)", "randn(1024, 4)")


@pytest.mark.parametrize(("strategy", "model", "devices", "num_samples"), PUBLISHED)
def test_cards_scale_as_others_have_measured(ranks, strategy, model, devices, num_samples):
    num, _, _ = count_devices(devices)
    chosen = {"source": MANY, "devices": devices, "as_": model, "compute": "", "link": ""}
    spec = spec_of(strategy, num, batch_size=num * num_samples, num_epochs=3, **chosen)
    found = last_seconds(ranks, spec, num)
    compute = MODELS[model].compute["V100"]
    alone = compute.of(num_samples)
    assert alone / found == pytest.approx(
        PUBLISHED[strategy, model, devices, num_samples], abs=0.05
    )
    given = {"devices": spec.emulated, "batch_size": spec.batch_size, "alone": (), "num_bytes": S}
    machine = calibrate(measured(**given))
    predicted = step_seconds(strategy, machine.work, machine.here, num)
    assert predicted == pytest.approx(found, rel=1e-3)


DEEP = CELL.replace("randn(96, 4)", "randn(512, 4)").replace(
    "nn.Linear(4, 300), nn.Linear(300, 2, bias=False)",
    "nn.Linear(4, 64), *[nn.Linear(64, 64) for _ in range(12)], nn.Linear(64, 16)",
)
CLOSE = {"fsdp": 0.05, "fsdp:reshard=off": 0.05, "zero": 0.08, "ring-by-hand": 0.005}
"""Relative differences of strategies that send layers, tensors or chunks of different sizes."""
ALIKE = ["ddp:hook=fp16", "ddp-by-hand", "central", "gossip", "dp", *CLOSE]


@pytest.mark.parametrize(("devices", "link"), [("8xV100", "25GbE"), ("4xV100/2", "")])
@pytest.mark.parametrize("strategy", ALIKE)
def test_a_prediction_is_what_the_clock_computes(ranks, strategy, devices, link):
    """Every strategy that copies all gradients or weights to buffers needs DDP's time for it."""
    num, _, num_hosts = count_devices(devices)
    if strategy == "gossip" and num_hosts > 1:
        pytest.skip("only some of the pairs use the link between the hosts")
    chosen = {"source": DEEP, "devices": devices, "as_": "resnet50", "compute": "", "link": link}
    spec = spec_of(strategy, num, batch_size=num * 32, num_epochs=3 * num / 16, **chosen)
    found = last_seconds(ranks, spec, num)
    num_bytes = 4 * (5 * 64 + 12 * 65 * 64 + 65 * 16)
    given = {"devices": spec.emulated, "batch_size": spec.batch_size, "num_bytes": num_bytes}
    machine = calibrate(measured(alone=(), **given))
    predicted = step_seconds(strategy, machine.work, machine.here, num)
    assert found == pytest.approx(predicted, rel=CLOSE.get(strategy, 2e-3))


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("ddp", 3), *((name, 4) for name in ("dp", "fsdp", "local-sgd", "ring-by-hand")), ("ddp", 8)],
)
def test_losses_are_those_of_measured_ranks_to_the_bit(ranks, strategy, num_ranks):
    large = {"source": CELL.replace("300", "3000")}  # emulated ranks sum it in shared memory
    emulated, measured = (
        ranks(num_ranks).call(train_job, spec_of(strategy, num_ranks, **large, **options))
        for options in ({}, {"devices": "", "compute": "", "link": ""})
    )
    assert losses(emulated[0])
    assert list(map(losses, emulated)) == list(map(losses, measured))
