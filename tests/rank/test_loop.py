"""A run reports all results, stops on request, and compiles before the clock starts."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import ddpnb
from ddpnb.protocol.devices import MODELS
from ddpnb.protocol.messages import Memory
from ddpnb.rank.clock import MeasuredClock
from ddpnb.rank.tasks import digits
from tests.cells import CELL, ROWS, STEP, WITH_DROPOUT
from tests.programs import printed
from tests.rank import runs
from tests.rank.runs import train_job

PACKAGE = Path(ddpnb.__file__).parent
OTHERS = ["single", "no-comm", "local-sgd", "hogwild"]
"""Strategies that do not communicate, or at other times than ``runs.FEATURED``."""


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("ddp", 1), *((name, 2) for name in OTHERS), *((name, 3) for name in runs.FEATURED)],
)
def test_header_events_and_reports_agree(ranks, strategy, num_ranks):
    results = ranks(num_ranks).call(train_job, runs.spec_of(strategy, source=WITH_DROPOUT))
    header, steps = runs.header_of(results[0]), [runs.steps_of(result) for result in results]
    assert sum(step.num_samples for mine in steps for step in mine) == header.num_samples
    assert header.num_samples == 3 * (200 - 200 % num_ranks)  # like DistributedSampler(drop_last)
    assert header.num_workers == (1 if strategy == "single" else num_ranks)
    assert header.synchronous == (strategy not in runs.ASYNCHRONOUS)
    assert header.is_emulated == (strategy == "dp")
    for (report, _), mine in zip(results, steps, strict=True):
        assert [step.step for step in mine] == list(range(report.num_steps))
        assert [step.seconds for step in mine] == sorted(step.seconds for step in mine)
        assert all((step.staleness is None) == (strategy not in runs.ASYNCHRONOUS) for step in mine)
        before = 0.0
        for step in mine:
            exclusive = sum(step.parts) - step.parts.hidden
            assert exclusive == pytest.approx(step.seconds - before, abs=1e-6)
            assert min(step.parts) >= 0
            assert step.parts.forward > 0 < step.parts.backward
            before = step.seconds
            # hogwild communicates inside the optimizer's update
            if step.num_bytes_sent and strategy != "hogwild":
                assert step.parts.communication + step.parts.waiting > 0
        if mine:
            assert report.seconds >= mine[-1].seconds  # includes time after the last step
    sends = any(step.num_bytes_sent for mine in steps for step in mine)
    assert sends == (num_ranks > 1 and strategy not in ("single", "no-comm"))
    (first, _), *others = results
    assert max(first.final_loss, first.held_out_loss) < 0.6
    assert first.held_out_accuracy > 0.7
    assert all(math.isnan(report.final_loss) for report, _ in others)  # only rank 0 evaluates


DEEP = f"""
import torch
import torch.distributed as dist
from torch import nn

def model():
    inner = [nn.Linear(256, 256) for _ in range(8)]
    return nn.Sequential(nn.Linear(4, 256), *inner, nn.Linear(256, 2))
{ROWS}"""
"""Eight layers of 0.26 MB. After DDP's first step they fill several buckets, sent early but one."""
HIDES = ["ddp", "ddp:hook=fp16", "ddp-overlap-by-hand:bucket_mb=0.6"]


@pytest.mark.parametrize("word", [*HIDES, "ddp-by-hand"])
def test_exposed_and_hidden_communication_are_distinguished(ranks, word):
    for result in ranks(2).call(train_job, runs.spec_of(word, source=DEEP)):
        for step in runs.steps_of(result)[1:]:
            parts = step.parts
            assert parts.communication > 0
            assert (parts.hidden > 0) == (word in HIDES)
            assert parts.hidden < parts.backward + parts.communication


COUNTING = (
    CELL + STEP.replace("return ", "return {'threads': torch.get_num_threads(), 'loss': ") + "}"
)


@pytest.mark.parametrize(("strategy", "expected"), [("single", 1), ("single:threads=all", 2)])
def test_one_process_may_have_the_threads_of_all(ranks, strategy, expected):
    result, _ = ranks(2).call(train_job, runs.spec_of(strategy, source=COUNTING))
    header = runs.header_of(result)
    assert {step.metrics["threads"] for step in runs.steps_of(result)} == {expected}
    assert (header.num_threads, header.num_devices, header.num_workers) == (expected, expected, 1)


RARELY = f"""{CELL}
class Rarely:
    def __init__(self, every=1, synchronous=True):
        self.every, self.synchronous, self.num_steps = every, synchronous, 0
    def setup(self, worker):
        self.worker = worker
    def step(self, batch):
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            torch.distributed.all_reduce(torch.ones(1))
        return self.worker.compute_gradients(batch)
    def finish(self):
        torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    ("strategy", "stop_ranks", "most"),
    [
        ("ddp", [0], 30),
        ("ddp", [1], 30),
        ("local-sgd", [1], 50),
        ("gossip", [0], 50),
        ("async", [0, 1], math.inf),
        ("Rarely:every=9", [1], 50),
        ("Rarely:every=50", [0], 140),
        ("Rarely:every=50,synchronous=off", [1], 140),
        ("Rarely:every=500", [0], 1100),
    ],
)
def test_a_stop_of_one_rank_ends_the_run_on_all(ranks, strategy, stop_ranks, most):
    run_id = f"stopped-{strategy}-{stop_ranks}"  # unique, because the group's store keeps stops
    source = RARELY if "Rarely" in strategy else CELL
    spec = runs.spec_of(strategy, num_epochs=300, run_id=run_id, source=source)
    results = ranks(2).call(train_job, spec, 20, stop_ranks)
    reports = [report for report, _ in results]
    num_samples = sum(step.num_samples for each in results for step in runs.steps_of(each))
    assert num_samples < runs.header_of(results[0]).num_samples
    assert all(report.was_stopped for report in reports)
    assert reports[stop_ranks[0]].num_steps >= 20
    if strategy not in runs.ASYNCHRONOUS:
        assert reports[0].num_steps == reports[1].num_steps <= most
    if source == CELL:
        assert reports[0].held_out_accuracy > 0.6


def held(ranks, strategy: str, **changes) -> list[Memory]:
    spec = runs.spec_of(strategy, **{"task": "digits", "source": "", "momentum": 0.9} | changes)
    results = ranks(2).call(train_job, replace(spec, num_epochs=0.1))
    return [report.memory for report, _ in results if report.memory.total]


def test_a_report_says_what_each_rank_holds(ranks):
    size = 4 * sum(each.numel() for each in digits.model().parameters())
    ddp, zero, fsdp, dp, shared = (held(ranks, n) for n in ("ddp", "zero", "fsdp", "dp", "async"))
    of_ddp = ddp[0].activations
    assert ddp == 2 * [Memory(size, size, size, of_ddp)]
    assert [each[:3] for each in dp] == [(size, size, size)]  # the first device
    assert of_ddp < dp[0].activations < 1.02 * of_ddp  # gathers all devices' outputs
    # For 16 images per rank: the inputs of four layers and of the pooling, and its indices.
    features = 64 + 32 * 64 + 64 * 64 + 64 * 16 + 256
    assert 4 * 16 * features < of_ddp < 2 * 4 * 16 * features
    assert all(each[:2] == (size, size) and each.activations == of_ddp for each in zero)
    assert sum(each.optimizer for each in zero) == size
    assert [sum(part) for part in list(zip(*fsdp, strict=True))[:3]] == [size, size, size]
    assert [each[:3] for each in shared] == [(2 * size, size, size), (size, size, 0)]
    published = 4 * MODELS["resnet50"].num_parameters
    chosen = {"devices": "2xV100", "as_": "resnet50"}
    assert held(ranks, "ddp", **chosen) == 2 * [Memory(published, published, published)]
    parts = held(ranks, "fsdp", **chosen)
    assert sum(each.parameters for each in parts) == pytest.approx(published)


def test_a_run_whose_evaluation_fails_is_kept_and_says_so(ranks):
    source = CELL + (
        "def data(split):\n"
        "    x = torch.randn(200, 4)\n"
        "    targets = (x.sum(dim=1) > 0).long()\n"
        "    if split == 'test': targets[199] = 2\n"  # the check does not try this sample
        "    return x, targets\n"
    )
    spec = runs.spec_of("ddp", source=source)
    result = ranks(2).call(train_job, spec)[0]
    assert result[0].num_steps == len(runs.losses(result)) > 0
    assert result[0].final_loss < 0.6
    assert math.isnan(result[0].held_out_loss)
    ((rank, text),) = runs.marks_of(result)
    assert rank == 0
    assert "IndexError: Target 2 is out of bounds." in text


def drawn_job(state, folder, spec, seed):
    """Run a spec after seeding the user's random numbers, and return the losses."""
    with torch.random.fork_rng():
        torch.manual_seed(seed + state.rank)
        return runs.losses(train_job(state, folder, spec))


def test_a_run_repeats_whatever_random_numbers_came_before(ranks):
    spec = runs.spec_of("ddp", source=WITH_DROPOUT)
    one, other = (ranks(2).call(drawn_job, spec, seed) for seed in (3, 30))
    assert one == other
    assert one != ranks(2).call(drawn_job, replace(spec, seed=1), 3)


COMPILED = CELL + ("plain = model\ndef model(): return torch.compile(plain(), backend='eager')\n")


def compiled_job(state, folder, spec) -> list[int]:
    """Train, and return how many graphs torch has compiled before each measured step."""
    found, begin_step = [], MeasuredClock.begin_step

    def begin(self, num_samples: int) -> None:
        found.append(counters["stats"]["unique_graphs"])
        begin_step(self, num_samples)

    with mock.patch.object(MeasuredClock, "begin_step", begin):
        train_job(state, folder, spec)
    return found


def test_every_size_of_batch_is_compiled_before_the_clock_starts(fresh_ranks):
    """Two workers get 17 and 16 of 33 samples, and one sample each of the last batch."""
    spec = runs.spec_of("async", source=COMPILED, batch_size=33)
    for num_graphs in fresh_ranks(2).call(compiled_job, spec):
        assert num_graphs[0] > 0
        assert len(num_graphs) > 9
        assert set(num_graphs) == {num_graphs[0]}


IMPORTING = """
import sys, torch
called = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device",
             "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: called.append(name) or 0)
torch._C._cuda_getDeviceCount = lambda: called.append("_cuda_getDeviceCount") or 0
import ddpnb.rank.calls, ddpnb.rank.training.loop
few = {"sklearn", "torch.distributed.tensor", "torch.distributed.optim"}
print(called, few & set(sys.modules))
"""


def test_importing_what_ranks_need_calls_nothing_of_cuda_and_imports_no_more():
    assert printed(IMPORTING) == "[] set()\n"


FEW = {"ddp": 12, "dp": 10, "async": 12}
"""Maximum number of ddpnb's files that one measured step enters, by strategy."""


def files_of_a_step(state, folder, spec) -> list[str]:
    """Return the files of ddpnb that the fifth step of a run enters, with the first function."""
    found: dict[str, str] = {}
    num_begun = 0
    begin_step = MeasuredClock.begin_step

    def note(frame, event, _) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.setdefault(str(path.relative_to(PACKAGE)), frame.f_code.co_name)

    def begin(self, num_samples: int) -> None:
        nonlocal num_begun
        num_begun += 1
        sys.setprofile(note if num_begun == 5 else None)
        begin_step(self, num_samples)

    with mock.patch.object(MeasuredClock, "begin_step", begin):
        try:
            train_job(state, folder, spec)
        finally:
            sys.setprofile(None)
    return [f"{path}: {name}" for path, name in found.items()]


@pytest.mark.parametrize("strategy", FEW)
def test_a_step_enters_few_files(ranks, strategy):
    entered, *_ = ranks(2).call(files_of_a_step, runs.spec_of(strategy, eval_every=0.0))
    print(strategy, *entered, sep="\n  ")
    assert 5 < len(entered) <= FEW[strategy], entered
