"""Are the replicas the same, and which rank gets which samples: through the magics."""

import pytest

from tests.kernel.client import Kernel, both

MODEL = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
"""
STEP = """
optimizer.zero_grad()
ddp(torch.randn(16, 4)).pow(2).sum().backward()
"""


@pytest.fixture
def empty(kernel: Kernel) -> Kernel:
    """The shared kernel; its ranks have no variables of earlier tests."""
    kernel.run("%%ddp\n%reset_selective -f ^(?!rank$|local_rank$|world_size$|device$|_)")
    return kernel


def verdicts(kernel: Kernel, line: str) -> dict[str, str]:
    """Check, and return the verdict on each part."""
    cell = kernel.run(f"found = {line}")
    assert not cell.error, cell.error_text
    found = kernel.value("{f'{e.part} {e.name}'.strip(): e.verdict.name for e in found.findings}")
    return dict(eval(found))


def test_replicas_are_compared_and_a_skipped_step_is_named(empty: Kernel):
    kernel = empty
    kernel.run(f"%%ddp{MODEL}")
    assert verdicts(kernel, "%ddp_check")["parameters model"] == "DIFFERENT"
    kernel.run(f"%%ddp\nddp = DDP(model)\noptimizer = torch.optim.Adam(ddp.parameters()){STEP}")
    kernel.run("%%ddp\noptimizer.step()\nbefore = torch.get_rng_state()")
    found = verdicts(kernel, "%ddp_check ddp optimizer")
    facts = {found.pop("buffers ddp"), found.pop("random state")}
    assert facts == {"FACT"}
    assert set(found.values()) == {"SAME"}
    assert verdicts(kernel, "%ddp_check model")["buffers model"] == "FACT"  # inside the DDP
    kernel.run("%%rank 1\noptimizer.step()")
    text = kernel.run("found = %ddp_check ddp optimizer\nfound").text
    assert "optimizer has counted 1 on rank 0 and 2 on rank 1" in text
    assert "step of 0.weight: rank 0 against rank 1, 1 of 1 element: 1 at most" in text
    same = "torch.equal(before, torch.get_rng_state()), torch.is_grad_enabled()"
    assert kernel.run(f"%%ddp\nprint({same})").by_rank == both("True True")


def test_sharded_state_is_not_called_different(empty: Kernel):
    kernel = empty
    kernel.run(
        f"""%%ddp{MODEL}
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
sharded = nn.Linear(4, 4)
fully_shard(sharded)
ddp = DDP(model)
optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
{STEP}
optimizer.step()
"""
    )
    found = verdicts(kernel, "%ddp_check sharded optimizer")
    assert found["parameters sharded"] == found["state optimizer"] == "UNKNOWN"
    assert "DIFFERENT" not in found.values()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "No rank"),
        ("valu", "did you mean value?"),
        ("only", "Only rank 1 has only"),
        ("value", "value on rank 0 is an int"),
        ("value[0]", "TypeError"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(empty: Kernel, line: str, named: str):
    empty.run("%%ddp\nvalue = 1")
    empty.run("%%rank 1\nimport torch\nonly = torch.ones(2)")
    cell = empty.run(f"%ddp_check {line}")
    assert cell.error == "UserError"
    assert named in cell.error_text


LOADERS = """%%ddp
import torch
from torch.utils.data import DataLoader, IterableDataset
loader = DataLoader(list(range(6)), batch_size=2, shuffle=True)
class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))
stream = DataLoader(Stream())
before = torch.get_rng_state()
"""


def test_samples_are_handed_out_by_torchs_sampler_on_the_ranks(empty: Kernel):
    kernel = empty
    cell = kernel.run("%ddp_samples -n 5 --epochs 2")
    assert "rank 0: 0 2 4" in cell.text
    assert "rank 1: 1 3 0" in cell.text
    (output,) = (each for each in cell.outputs if "data" in each)
    assert {"image/png", "text/html", "text/plain"} <= set(output["data"])
    kernel.run(LOADERS)
    assert "the same samples" in kernel.run("%ddp_samples loader --epochs 1").text
    kept = kernel.run("%%ddp\nprint(torch.equal(before, torch.get_rng_state()))")
    assert kept.by_rank == both("True")
    for line, named in (
        ("stream", "IterableDataset"),
        ("lader", "did you mean loader?"),
        ("torch", "a module"),
        ("-n 0", "-n takes"),
    ):
        assert named in kernel.run(f"%ddp_samples {line}").error_text
    assert "loader" in kernel.complete("%ddp_samples loa")


def test_shards_of_a_stored_run_are_shown_by_worker(kernel: Kernel):
    kernel.run("%ddp_compare async ddp --no-baseline --name shards --task digits --epochs 2")
    handed_out = kernel.run("import ddpnb\nfound = ddpnb.samples('shards/async')")
    assert not handed_out.error, handed_out.error_text
    owned = "sorted(int(n) for row in found.rows for each in row.handed_out for n in each)"
    assert kernel.value(f"{owned} == list(range(len({owned}))) != []") == "True"
    assert kernel.run("%ddp_samples shards/ddp").error == "UserError"  # trained synchronously
