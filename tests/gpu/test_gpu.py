"""The cluster and the strategies on real GPUs. These tests were written without a GPU."""

import time
from collections.abc import Iterator

import pytest
import torch

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import StepEvent
from ddpnb.rank.clock import MAX_PENDING, MeasuredClock
from ddpnb.session.errors import RankError
from ddpnb.session.session import only_session

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA GPU")]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA GPUs, found {NUM_GPUS}")


@pytest.fixture(autouse=True)
def in_a_project_of_its_own(tmp_path, monkeypatch) -> Iterator[None]:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    only_session.cache_clear()
    yield
    ddpnb.stop()


SAME = ("ddp", "ddp-by-hand", "ddp-overlap-by-hand", "ring-by-hand", "central", "zero", "dp")
"""Strategies that compute the same steps as ``single``, except for the order of sums."""
NEAR = ("async", "local-sgd", "diloco", "gossip")
DIGITS = {"task": "digits", "lr": 0.02, "batch_size": 128}
ITEMS_ON_GPU = """
import torch
from torch import nn
def model(): return nn.Linear(4, 2)
class Items(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, n): return torch.ones(4, device='cuda') * n, n % 2
def data(split): return Items()
"""
WITH_BATCHNORM = """
import torch
from torch import nn
def model(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
def data(split):
    x = torch.randn(128, 4)
    return x, (x.sum(1) > 0).long()
"""


def final_losses(result) -> dict[str, float]:
    return dict(result.runs().set_index("strategy").final_loss)


def notes(result, strategy: str) -> tuple[str, ...]:
    (run,) = (run for run in result.comparison.runs if run.name == strategy)
    return run.header.notes


def test_no_strategy_is_forgotten():
    assert {*SAME, *NEAR, "single", "no-comm", "hogwild", "fsdp"} == set(STRATEGIES)


def test_one_rank_uses_nccl_on_its_gpu_and_its_tensors_come_to_the_kernel_without_cuda():
    ddpnb.start(1)
    ddpnb.run_cell(
        "import torch, torch.distributed as dist, warnings\n"
        "from ddpnb.compat import torch_internals\n"
        "x = torch.arange(3., device=device); nested = {'x': [x, (x, 1)]}\n"
        "with warnings.catch_warnings(record=True) as seen: dist.all_reduce(x); dist.barrier()\n"
        "torch.cuda.synchronize()\n"
        "recorded = [(e['profiling_name'], e['state']) for e in torch_internals._recorded()]\n"
        "bound = [str(each.bound_device_id) for each in (dist.group.WORLD, dist.new_group([0]))]\n"
        "found = dist.get_backend(), str(x.device), bound, [str(each.message) for each in seen]"
    )
    assert ddpnb.pull("found", ranks="0") == ("nccl", "cuda:0", ["cuda:0"] * 2, [])
    recorded = ddpnb.pull("recorded", ranks="0")
    assert "nccl:all_reduce" in {name for name, _ in recorded}
    assert {state for _, state in recorded} <= {"scheduled", "started", "completed"}
    nested = ddpnb.pull("nested", ranks="0")["x"]
    assert [each.device.type for each in (nested[0], nested[1][0])] == ["cpu"] * 2
    assert nested[0].tolist() == [0, 1, 2]


def test_nccl_is_freed_when_a_cell_is_stopped():
    ddpnb.start(1)
    with pytest.raises(TimeoutError):
        ddpnb.run_cell("import time\nkept = 5\ntime.sleep(60)", timeout=2)
    assert ddpnb.pull("kept", ranks="0") == 5


def test_more_ranks_than_gpus_share_them_over_gloo_and_say_so():
    table = ddpnb.start(NUM_GPUS + 1)
    assert "shares cuda:0" in table.text()
    with pytest.raises(UserError, match="fsdp needs a GPU for each rank"):
        ddpnb.compare("fsdp", epochs=1, **DIGITS)
    with pytest.raises(UserError, match="hogwild needs ranks on CPUs"):
        ddpnb.compare("hogwild", epochs=1, **DIGITS)
    ddpnb.stop()
    with pytest.raises(UserError, match="one rank per GPU"):
        ddpnb.start(NUM_GPUS + 1, backend="nccl")


def test_every_strategy_trains_where_two_ranks_share_a_gpu():
    ddpnb.start(2, backend="gloo")
    found = ddpnb.compare(*SAME, *NEAR, "no-comm", epochs=4, **DIGITS).runs()
    assert set(found.device) == {"cuda:0"}
    found = found.set_index("strategy")
    for strategy in SAME:
        expected = pytest.approx(found.final_loss["single"], rel=0.02)
        assert found.final_loss[strategy] == expected, strategy
    assert (found.held_out_accuracy[[*NEAR]] > 0.6).all(), found.held_out_accuracy
    assert found.communication_seconds["zero"] > 0
    assert found.forward_seconds["zero"] > 0


def test_a_message_from_a_gpu_over_gloo_is_refused_and_the_ranks_live_on():
    ddpnb.start(2, backend="gloo")
    with pytest.raises(RankError, match="gloo sends and receives only CPU tensors"):
        ddpnb.run_cell(
            "import torch, torch.distributed as dist\nx = torch.ones(3, device=device)\n"
            "dist.send(x, 1) if rank == 0 else dist.recv(x, 0)"
        )
    ddpnb.run_cell("dist.all_reduce(x); total = x[0].item()")
    assert ddpnb.pull("total") == {0: 2.0, 1: 2.0}


def test_dp_finds_the_memory_that_ddp_has_left():
    """Each strategy's weights, gradients, buckets and momentum take 60 % of the rank's memory."""
    ddpnb.start(1)
    most = 4e9  # a whole GPU would take minutes to fill
    ddpnb.run_cell(
        "import torch\nfraction = "
        f"{most} / torch.cuda.get_device_properties(0).total_memory\n"
        "torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))"
    )
    size = int((0.6 * most / 16) ** 0.5)
    source = (
        "import torch\n"
        f"def model(): return torch.nn.Linear({size}, {size}, bias=False, device='cuda')\n"
        f"def data(split): return torch.randn(16, {size}), torch.arange(16)\n"
    )
    result = ddpnb.compare("ddp", "dp", source=source, batch_size=8, lr=1e-4, momentum=0.9)
    assert set(result.runs().status) == {"finished"}


def test_a_strategy_needs_the_same_memory_first_and_last():
    ddpnb.start(1)
    names = ("ddp", "local-sgd", "zero", "ddp-overlap-by-hand", "ddp:hook=fp16")
    result = ddpnb.compare(*names, repeats=2, epochs=2, **DIGITS)
    peaks: dict[str, set[int]] = {}
    for run in result.comparison.runs[1:]:  # the first run also loads kernels
        if run.reports[0].memory.peak:
            peaks.setdefault(run.name, set()).add(run.reports[0].memory.peak)
    assert all(max(each) - min(each) < 1e5 for each in peaks.values()), peaks


def test_choices_that_need_a_gpu():
    ddpnb.start(2, backend="gloo")
    chosen = {"source": WITH_BATCHNORM, "batch_size": 32, "amp": "bf16"}
    result = ddpnb.compare("ddp", slow="1:20ms", jitter=0.1, save=True, **chosen)
    assert any("20 ms slower" in note for note in notes(result, "ddp"))


def test_over_nccl_one_rank_alone_is_single_and_leaves_its_memory_to_the_others():
    ddpnb.start(1)
    names = (*SAME, "fsdp", "local-sgd", "gossip", "ddp:bucket_cap_mb=0.01")
    result = ddpnb.compare(*names, epochs=2, **DIGITS)
    losses = final_losses(result)
    assert losses == pytest.approx(dict.fromkeys(losses, losses["single"]), rel=0.02)
    (run,) = [run for run in result.comparison.runs if run.name == "ddp"]
    (report,) = run.reports
    assert report.memory.peak > sum(report.memory[:4])
    assert min(report.memory) > 0
    assert "driver" in result.comparison.environment["GPUs"]
    ddpnb.run_cell(  # on Hopper, cuBLAS keeps 32 MiB for each thread
        "import torch\ntorch._C._cuda_clearCublasWorkspaces()\n"
        "torch.cuda.empty_cache()\nheld = torch.cuda.memory_reserved()"
    )
    assert ddpnb.pull("held", ranks="0") < 64e6
    steps = result.steps()  # hidden time is part of the backward pass with any buckets
    steps = steps[steps.strategy == "ddp:bucket_cap_mb=0.01"]
    assert (steps.hidden_seconds <= steps.backward_seconds + 1e-4).all()
    halves = final_losses(ddpnb.compare("ddp", epochs=2, amp="bf16", **DIGITS))
    assert halves["ddp"] == pytest.approx(losses["ddp"], abs=0.1)
    assert halves["ddp"] != losses["ddp"]


def test_items_on_the_gpu_are_trained_on_but_not_loaded_by_other_processes():
    ddpnb.start(1)
    with pytest.raises(UserError, match="loading process"):
        ddpnb.compare("ddp", source=ITEMS_ON_GPU, batch_size=16, data_workers=1)
    result = ddpnb.compare("ddp", source=ITEMS_ON_GPU, batch_size=16, lr=1e-4)
    assert set(result.runs().status) == {"finished"}


def test_the_parts_of_a_step_add_up_on_the_gpus_own_clock_which_stands_still_while_paused():
    """After an hour, milliseconds in float32 would have a resolution of only 0.1 ms."""
    device = torch.device("cuda", 0)
    matrix = torch.randn(2048, 2048, device=device)
    clock = MeasuredClock(device)
    clock.start()
    clock.seconds = before = 3600.0
    timings = []
    for _ in range(3 * MAX_PENDING):
        clock.begin("forward")
        begun = clock.moment()
        result = matrix @ matrix
        clock.begin("optimizer")
        clock.hide(begun, clock.moment())
        timings += clock.timing(StepEvent(num_samples=1), {"loss": result.mean()})
    assert 0 <= 3 * MAX_PENDING - len(timings) <= MAX_PENDING
    with clock.paused():
        time.sleep(1)
    timings += clock.stop()
    assert len(timings) == 3 * MAX_PENDING
    for timing in timings:
        spent = sum(timing.parts) - timing.parts.hidden
        assert spent == pytest.approx(timing.seconds - before, rel=0.05, abs=2e-5)
        assert timing.parts.forward > 0
        before = timing.seconds
    assert clock.seconds == before < 3601


SETUP = "import torch, torch.distributed as dist\nx, kept = torch.ones(3, device=device), rank"
MEET = "dist.all_reduce(x); total = x[0].item()"


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_a_rank_that_waits_is_freed_when_another_raises(backend):
    """An abort ends the wait for the GPU without an error, so the cell continues with wrong data.
    Therefore the cell's failure counts as a consequence.
    """
    ddpnb.start(2, backend=backend)
    ddpnb.run_cell(f"{SETUP}; {MEET}")
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed first: ValueError: on purpose"):
        ddpnb.run_cell(f"if rank == 1: raise ValueError('on purpose')\n{MEET}", timeout=30)
    assert time.monotonic() - began < 10
    ddpnb.run_cell(f"x = torch.ones(3, device=device); {MEET}")
    assert ddpnb.pull("kept, total") == {0: (0, 2.0), 1: (1, 2.0)}


@two_gpus
def test_a_wait_on_the_gpu_is_noticed():
    """The waiting rank keeps a core busy because its Python code is in ``item``."""
    ddpnb.start(2)
    began = time.monotonic()
    with pytest.raises(RankError, match="all_reduce"):
        ddpnb.run_cell(f"{SETUP}\nif rank == 0: {MEET}")
    assert time.monotonic() - began < 20


@two_gpus
def test_over_nccl_two_ranks_train_as_one_and_restore_the_random_numbers_of_all_gpus():
    ddpnb.start(2)
    read = "import torch\nfound = [s.tolist() for s in torch.cuda.get_rng_state_all()]"
    ddpnb.run_cell(read)
    before = ddpnb.pull("found", ranks="0")
    result = ddpnb.compare(*SAME, "fsdp", epochs=2, **DIGITS)
    ddpnb.run_cell(read)
    assert ddpnb.pull("found", ranks="0") == before
    losses = final_losses(result)
    assert losses == pytest.approx(dict.fromkeys(losses, losses["single"]), rel=0.02)
    assert not any("emulated" in note for note in notes(result, "dp"))
    assert any("all communication counts as overlapped" in note for note in notes(result, "fsdp"))
    assert result.runs().set_index("strategy").hidden_seconds["fsdp"] > 0
