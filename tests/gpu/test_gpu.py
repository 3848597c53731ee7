"""The cluster and the strategies on real GPUs."""

import time
from collections.abc import Iterator

import pytest

import ddpnb
from ddpnb.errors import UserError
from ddpnb.notebook.session import this_session
from ddpnb.notebook.show.failures import RankError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_a_project_of_its_own(tmp_path, monkeypatch) -> Iterator[None]:
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    this_session.cache_clear()
    yield
    ddpnb.stop()


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
    import torch

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
    chosen = {"source": source, "batch_size": 32, "amp": "bf16", "sync_batchnorm": True}
    result = ddpnb.compare("ddp", slow="1:20ms", jitter=0.1, save_every=1, **chosen)
    assert not any("--sync-batchnorm" in note for note in headers(result)["ddp"])
    assert any("20 ms slower" in note for note in headers(result)["ddp"])


def test_a_gpus_clock_stands_still_while_it_is_paused():
    """Written without a GPU at hand."""
    import torch

    from ddpnb.rank.clock import clock_of
    from ddpnb.rank.strategies.base import StepReport

    clock = clock_of(torch.device("cuda", 0))
    clock.start()
    laps = []
    for _ in range(3):
        loss = torch.ones(200, 200, device="cuda").square().mean()
        laps += clock.lap(StepReport(loss=loss, num_samples=1))
        with clock.paused():
            time.sleep(1)
    laps += clock.stop()
    assert len(laps) == 3
    assert [lap.seconds for lap in laps] == sorted(lap.seconds for lap in laps)
    assert clock.seconds == laps[-1].seconds < 1.5
    assert sum(lap.parts.data for lap in laps) < 1.5


def test_nccl_is_freed_when_a_cell_is_stopped():
    ddpnb.start(1)
    with pytest.raises(TimeoutError):
        ddpnb.run_cell("import time\nkept = 5\ntime.sleep(60)", timeout=2)
    assert ddpnb.pull("kept", ranks="0") == 5


@pytest.mark.two_gpus
def test_data_parallel_is_torchs_own_on_two_gpus():
    ddpnb.start(2)
    result = ddpnb.compare("dp", task="digits", epochs=1)
    assert not any("emulated" in note for note in headers(result)["dp"])


@pytest.mark.two_gpus
def test_a_rank_that_waits_in_nccl_is_freed_when_another_raises():
    """Cutting aborts the communicators: torch's ``_abort_process_group``, "experimental and
    currently only works with the NCCL backend", with ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` as
    its docstring asks.  Written without a GPU at hand.
    """
    ddpnb.start(2)
    ddpnb.run_cell(
        "import torch, torch.distributed as dist\nkept = rank\n"
        "x = torch.ones(3, device=device); dist.all_reduce(x)"
    )
    source = (
        "if rank == 1: raise ValueError('on purpose')\ndist.all_reduce(x); print(x.sum().item())"
    )
    with pytest.raises(RankError, match="rank 1 failed first: ValueError: on purpose"):
        ddpnb.run_cell(source, timeout=30)
    ddpnb.run_cell("x = torch.ones(3, device=device); dist.all_reduce(x); total = x[0].item()")
    assert ddpnb.pull("kept, total") == {0: (0, 2.0), 1: (1, 2.0)}
