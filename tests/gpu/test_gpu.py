"""The cluster and the strategies on real GPUs.  Written without one at hand."""

import time
from collections.abc import Iterator

import pytest
import torch

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.rank.training.timing import MAX_PENDING, Clock, StepReport
from ddpnb.session.errors import RankError
from ddpnb.session.session import this_session

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_a_project_of_its_own(tmp_path, monkeypatch) -> Iterator[None]:
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    this_session.cache_clear()
    yield
    ddpnb.stop()


SAME = (
    "ddp",
    "ddp-by-hand",
    "ddp-overlap-by-hand",
    "ring-by-hand",
    "central",
    "zero",
    "dp",
)
"""Strategies whose every step is ``single``'s, but for the order of sums."""
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


def final_losses(result) -> dict[str, float]:
    return dict(result.to_frame().set_index("strategy").final_loss)


def headers(result) -> dict[str, tuple[str, ...]]:
    return {run.name: run.header.notes for run in result.comparison.runs}


def test_one_rank_uses_nccl_on_its_gpu():
    ddpnb.start(1)
    ddpnb.run_cell(
        "import torch, torch.distributed as dist\n"
        "x = torch.ones(3, device=device); dist.all_reduce(x)\n"
        "found = (dist.get_backend(), str(x.device))"
    )
    assert ddpnb.pull("found", ranks="0") == ("nccl", "cuda:0")


def test_more_ranks_than_gpus_share_them_over_gloo_and_say_so():
    num = torch.cuda.device_count() + 1
    table = ddpnb.start(num)
    assert "shares cuda:0" in table.text()
    ddpnb.stop()
    with pytest.raises(UserError, match="one rank per GPU"):
        ddpnb.start(num, backend="nccl")


def test_two_ranks_that_share_a_gpu_train_alike():
    ddpnb.start(2, backend="gloo")
    result = ddpnb.compare("ddp", "async", task="digits", epochs=3, lr=0.02, batch_size=128)
    frame = result.to_frame().set_index("strategy")
    assert frame.loc["ddp", "held_out_accuracy"] == pytest.approx(
        frame.loc["single", "held_out_accuracy"], abs=0.03
    )
    assert all(run.header.device.startswith("cuda") for run in result.comparison.runs)


def test_choices_that_need_a_gpu():
    ddpnb.start(2, backend="gloo")
    source = (
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))\n"
        "def data(split):\n    x = torch.randn(128, 4)\n    return x, (x.sum(1) > 0).long()\n"
    )
    chosen = {"source": source, "batch_size": 32, "amp": "bf16"}
    result = ddpnb.compare("ddp", slow="1:20ms", jitter=0.1, save=True, **chosen)
    assert any("20 ms slower" in note for note in headers(result)["ddp"])


def test_a_gpus_clock_stands_still_while_it_is_paused():
    """Written without a GPU at hand."""
    import torch

    clock = Clock(torch.device("cuda", 0))
    clock.start()
    timings = []
    for _ in range(3):
        loss = torch.ones(200, 200, device="cuda").square().mean()
        timings += clock.timing(StepReport(loss, 1))
        with clock.paused():
            time.sleep(1)
    timings += clock.stop()
    assert len(timings) == 3
    assert [timing.seconds for timing in timings] == sorted(timing.seconds for timing in timings)
    assert clock.seconds == timings[-1].seconds < 1.5
    assert sum(timing.parts.data for timing in timings) < 1.5


def test_nccl_is_freed_when_a_cell_is_stopped():
    ddpnb.start(1)
    with pytest.raises(TimeoutError):
        ddpnb.run_cell("import time\nkept = 5\ntime.sleep(60)", timeout=2)
    assert ddpnb.pull("kept", ranks="0") == 5


def test_no_strategy_is_forgotten():
    assert {*SAME, *NEAR, "single", "no-comm", "hogwild", "ddp-shm", "fsdp"} == set(STRATEGIES)


def test_every_strategy_trains_where_two_ranks_share_a_gpu():
    ddpnb.start(2, backend="gloo")
    result = ddpnb.compare(*SAME, *NEAR, "no-comm", epochs=4, **DIGITS)
    found = result.to_frame()
    assert set(found.device) == {"cuda:0"}
    losses = dict(found.set_index("strategy").final_loss)
    for strategy in SAME:
        assert losses[strategy] == pytest.approx(losses["single"], rel=0.02), strategy
    accuracy = found.set_index("strategy").held_out_accuracy
    assert (accuracy[[*NEAR]] > 0.6).all(), accuracy
    with pytest.raises(UserError, match="hogwild needs ranks on CPUs"):
        ddpnb.compare("hogwild", epochs=1, **DIGITS)


@pytest.mark.parametrize("strategy", ["zero"])
def test_parts_tell_of_messages_where_two_ranks_share_a_gpu(strategy):
    ddpnb.start(2, backend="gloo")
    found = ddpnb.compare(strategy, epochs=1, **DIGITS).to_frame().set_index("strategy")
    assert found.loc[strategy, "communication_seconds"] > 0
    assert found.loc[strategy, "forward_seconds"] > 0


def test_over_nccl_one_rank_alone_is_single():
    ddpnb.start(1)
    names = (*SAME, "fsdp", "local-sgd", "gossip")
    losses = final_losses(ddpnb.compare(*names, epochs=2, **DIGITS))
    for strategy, loss in losses.items():
        assert loss == pytest.approx(losses["single"], rel=0.02), strategy


def test_the_parts_of_a_step_add_up_on_the_gpus_own_clock():
    device = torch.device("cuda", 0)
    matrix = torch.randn(2048, 2048, device=device)
    clock = Clock(device)
    clock.start()
    timings = []
    for _ in range(3 * MAX_PENDING):
        clock.begin("forward")
        begun = clock.moment()
        result = matrix @ matrix
        clock.begin("optimizer")
        clock.hide(begun, clock.moment())
        timings += clock.timing(StepReport(result.mean(), 1))
    ahead = 3 * MAX_PENDING - len(timings)
    assert 0 <= ahead <= MAX_PENDING
    timings += clock.stop()
    assert len(timings) == 3 * MAX_PENDING
    before = 0.0
    for timing in timings:
        spent = sum(timing.parts) - timing.parts.hidden
        assert spent == pytest.approx(timing.seconds - before, rel=0.05, abs=2e-5)
        assert timing.parts.forward > 0
        before = timing.seconds
    assert clock.seconds == before


def test_a_clock_that_has_run_for_long_is_as_fine():
    """Milliseconds since the start, as float32, would be no finer than 0.1 ms."""
    clock = Clock(torch.device("cuda", 0))
    clock.start()
    clock.seconds = 3600.0
    timings = []
    for _ in range(20):
        timings += clock.timing(StepReport(torch.ones(9, device="cuda").mean(), 1))
    timings += clock.stop()
    ends = [timing.seconds for timing in timings]
    assert len(set(ends)) == 20
    assert ends == sorted(ends)


def test_memory_is_what_tensors_really_held():
    ddpnb.start(1)
    result = ddpnb.compare("ddp", epochs=1, **DIGITS)
    (run,) = [run for run in result.comparison.runs if run.name == "ddp"]
    (report,) = run.reports
    assert report.memory.peak > sum(report.memory[:4])
    assert min(report.memory) > 0


def test_a_run_leaves_its_memory_to_the_others():
    ddpnb.start(1)
    ddpnb.compare("ddp", epochs=1, **DIGITS)
    ddpnb.run_cell("import torch\nheld = torch.cuda.memory_reserved()")
    assert ddpnb.pull("held", ranks="0") < 64e6


def test_fsdp_is_refused_where_ranks_share_a_gpu():
    ddpnb.start(2, backend="gloo")
    with pytest.raises(UserError, match="fsdp needs a GPU for each rank"):
        ddpnb.compare("fsdp", epochs=1, **DIGITS)


def test_loading_processes_that_touch_the_gpu_are_refused_before_anything_trains():
    ddpnb.start(1)
    with pytest.raises(UserError, match="loading process"):
        ddpnb.compare("ddp", source=ITEMS_ON_GPU, batch_size=16, data_workers=1)


def test_overlap_of_ddp_is_hidden_once():
    """What is hidden is a part of the backward pass, however many buckets there are."""
    ddpnb.start(1)
    steps = ddpnb.compare("ddp:bucket_cap_mb=0.01", epochs=1, **DIGITS).steps()
    ddp = steps[steps.strategy == "ddp:bucket_cap_mb=0.01"]
    assert (ddp.hidden_seconds <= ddp.backward_seconds + 1e-4).all()


def test_bf16_learns_as_well():
    ddpnb.start(1)
    halves = final_losses(ddpnb.compare("ddp", epochs=3, amp="bf16", **DIGITS))
    whole = final_losses(ddpnb.compare("ddp", epochs=3, **DIGITS))
    assert halves["ddp"] == pytest.approx(whole["ddp"], abs=0.1)
    assert halves["ddp"] != whole["ddp"]


def test_a_rank_that_waits_is_freed_when_another_raises():
    ddpnb.start(2, backend="gloo")
    ddpnb.run_cell("import torch, torch.distributed as dist\nkept = torch.ones(3, device=device)")
    with pytest.raises(RankError, match="rank 1 failed first: ValueError: on purpose"):
        ddpnb.run_cell(
            "if rank == 1: raise ValueError('on purpose')\ndist.all_reduce(kept)", timeout=30
        )
    ddpnb.run_cell("x = torch.ones(3, device=device); dist.all_reduce(x); total = x[0].item()")
    assert ddpnb.pull("total") == {0: 2.0, 1: 2.0}
    assert ddpnb.pull("str(kept.device)", ranks="1") == "cuda:0"


def test_tensors_come_to_the_kernel_without_cuda():
    ddpnb.start(1)
    ddpnb.run_cell("import torch\nx = torch.arange(3., device=device)\nnested = {'x': [x, (x, 1)]}")
    assert ddpnb.pull("x", ranks="0").device.type == "cpu"
    nested = ddpnb.pull("nested", ranks="0")
    assert nested["x"][1][0].tolist() == [0, 1, 2]
    assert nested["x"][1][0].device.type == "cpu"


def test_items_on_the_gpu_are_trained_on():
    ddpnb.start(1)
    result = ddpnb.compare("ddp", source=ITEMS_ON_GPU, batch_size=16, lr=1e-4)
    assert set(result.to_frame().status) == {"finished"}


def test_nccl_tells_the_monitor_what_it_has_begun():
    ddpnb.start(1)
    ddpnb.run_cell(
        "import torch, torch.distributed as dist\n"
        "from ddpnb.compat import torch_internals\n"
        "dist.all_reduce(torch.ones(3, device=device)); torch.cuda.synchronize()\n"
        "found = [(e['profiling_name'], e['state']) for e in torch_internals._recorded()]"
    )
    found = ddpnb.pull("found", ranks="0")
    assert {name for name, _ in found} >= {"nccl:all_reduce"}
    assert {state for _, state in found} <= {"scheduled", "started", "completed"}


def test_nccl_knows_the_gpu_of_its_rank():
    ddpnb.start(1)
    ddpnb.run_cell(
        "import warnings, torch, torch.distributed as dist\n"
        "with warnings.catch_warnings(record=True) as seen: dist.barrier()\n"
        "pair = dist.new_group([0])\n"
        "found = [str(each.bound_device_id) for each in (dist.group.WORLD, pair)]\n"
        "warned = [str(each.message) for each in seen]"
    )
    assert ddpnb.pull("found, warned", ranks="0") == (["cuda:0"] * 2, [])


@pytest.mark.two_gpus
def test_a_wait_on_the_gpu_is_noticed():
    """The rank that waits keeps a core busy: its Python code is in ``item``."""
    ddpnb.start(2)
    source = (
        "import torch, torch.distributed as dist\n"
        "x = torch.ones(3, device=device)\n"
        "if rank == 0: dist.all_reduce(x, async_op=True).wait(); print(x.sum().item())"
    )
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ddpnb.run_cell(source)
    assert "all_reduce" in str(caught.value)
    assert time.monotonic() - began < 20


@pytest.mark.two_gpus
def test_data_parallel_is_torchs_own_on_two_gpus():
    ddpnb.start(2)
    result = ddpnb.compare("dp", task="digits", epochs=1)
    assert not any("emulated" in note for note in headers(result)["dp"])


@pytest.mark.two_gpus
def test_random_numbers_of_all_gpus_are_restored():
    ddpnb.start(2)
    read = "import torch\nfound = [s.tolist() for s in torch.cuda.get_rng_state_all()]"
    ddpnb.run_cell(read)
    before = ddpnb.pull("found", ranks="0")
    ddpnb.compare("dp", epochs=1, **DIGITS)
    ddpnb.run_cell(read)
    assert ddpnb.pull("found", ranks="0") == before


@pytest.mark.two_gpus
@pytest.mark.parametrize("strategy", SAME)
def test_over_nccl_two_ranks_train_as_one(strategy):
    ddpnb.start(2)
    losses = final_losses(ddpnb.compare(strategy, epochs=2, **DIGITS))
    assert losses[strategy] == pytest.approx(losses["single"], rel=0.02)


@pytest.mark.two_gpus
def test_over_nccl_fsdp_says_what_it_cannot_tell():
    ddpnb.start(2)
    result = ddpnb.compare("fsdp", epochs=1, **DIGITS)
    assert any("all communication counts as overlapped" in note for note in headers(result)["fsdp"])
    assert result.to_frame().set_index("strategy").loc["fsdp", "hidden_seconds"] > 0


@pytest.mark.two_gpus
def test_a_rank_that_waits_in_nccl_is_freed_when_another_raises():
    """Cutting aborts the communicators.  The wait is for the GPU, and ends without an error:
    what the cell goes on with means nothing, so it fails as a consequence.
    """
    ddpnb.start(2)
    ddpnb.run_cell(
        "import torch, torch.distributed as dist\nkept = rank\n"
        "x = torch.ones(3, device=device); dist.all_reduce(x)"
    )
    source = (
        "if rank == 1: raise ValueError('on purpose')\ndist.all_reduce(x); print(x.sum().item())"
    )
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed first: ValueError: on purpose"):
        ddpnb.run_cell(source, timeout=30)
    assert time.monotonic() - began < 10
    ddpnb.run_cell("x = torch.ones(3, device=device); dist.all_reduce(x); total = x[0].item()")
    assert ddpnb.pull("kept, total") == {0: (0, 2.0), 1: (1, 2.0)}
