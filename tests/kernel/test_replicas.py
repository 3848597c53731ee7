"""Are the replicas the same, and which rank gets which samples: through the magics."""

import pytest

from tests.kernel.client import Kernel

MODEL = """%%ddp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
ddp = DDP(model)
optimizer = torch.optim.Adam(ddp.parameters())
ddp(torch.randn(16, 4)).pow(2).sum().backward()
optimizer.step()
sharded = nn.Linear(4, 4)
fully_shard(sharded)
loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2, shuffle=True)
only = torch.ones(2) if rank else None
before = torch.get_rng_state()
"""


@pytest.fixture(scope="module")
def with_model(kernel_of_module: Kernel) -> Kernel:
    cell = kernel_of_module.run(MODEL)
    assert not cell.error, cell.error_text
    return kernel_of_module


def verdicts(kernel: Kernel, line: str) -> dict[str, str]:
    """Check, and return the verdict on each part."""
    cell = kernel.run(f"found = {line}")
    assert not cell.error, cell.error_text
    found = kernel.value("{f'{e.part} {e.name}'.strip(): e.verdict.name for e in found.findings}")
    return dict(eval(found))


def test_replicas_are_compared_and_a_skipped_step_is_named(with_model: Kernel):
    kernel = with_model
    found = verdicts(kernel, "%ddp_check ddp optimizer sharded")
    assert found.pop("buffers ddp") == "FACT"
    assert found.pop("parameters sharded") == "UNKNOWN"
    assert set(found.values()) == {"SAME"}
    assert verdicts(kernel, "%ddp_check model")["buffers model"] == "FACT"  # inside the DDP
    kernel.run("%%rank 1\noptimizer.step()")
    text = kernel.run("%ddp_check").text
    assert "optimizer has counted 1 on rank 0 and 2 on rank 1" in text
    assert "step of 0.weight: rank 0 against rank 1, 1 of 1 element: 1 at most" in text
    kernel.run("%%rank 1\ndel sharded")
    assert verdicts(kernel, "%ddp_check")["values sharded"] == "UNKNOWN"  # is on rank 0 alone
    kept = kernel.run("%%ddp\nprint(torch.equal(before, torch.get_rng_state()))")
    assert kept.by_rank == {0: ["True"], 1: ["True"]}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("%ddp_check only", "On rank 0 alone: only is None"),
        ("%ddp_samples lader", "did you mean loader?"),
        ("%ddp_samples torch", "torch is a module"),
        ("%ddp_samples -n 0", "-n takes"),
    ],
)
def test_a_mistake_is_one_sentence(with_model: Kernel, line: str, named: str):
    cell = with_model.run(line)
    assert cell.error == "UserError"
    assert named in cell.error_text


def test_samples_are_handed_out_by_torchs_sampler_on_the_ranks(with_model: Kernel):
    cell = with_model.run("%ddp_samples -n 5 --epochs 2")
    assert "rank 0: 0 2 4" in cell.text
    assert "rank 1: 1 3 0" in cell.text
    assert "the same samples" in with_model.run("%ddp_samples loader --epochs 1").text


def test_shards_of_a_stored_run_are_shown_by_worker(with_model: Kernel):
    with_model.run("%ddp_compare async ddp --no-baseline --name shards --task digits --epochs 2")
    handed_out = with_model.run("import ddpnb\nfound = ddpnb.samples('shards/async')")
    assert not handed_out.error, handed_out.error_text
    owned = "sorted(int(n) for row in found.rows for each in row.handed_out for n in each)"
    assert with_model.value(f"{owned} == list(range(len({owned}))) != []") == "True"
    assert with_model.run("%ddp_samples shards/ddp").error == "UserError"  # trained synchronously
