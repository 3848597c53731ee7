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
(ddp if "ddp" in globals() else model)(torch.randn(16, 4)).pow(2).sum().backward()
"""


@pytest.fixture
def empty(kernel: Kernel) -> Kernel:
    """The shared kernel; its ranks have no variables of earlier tests."""
    kernel.run("%%ddp\n%reset_selective -f ^(?!rank$|local_rank$|world_size$|device$|_)")
    return kernel


def test_replicas_are_compared_and_a_skipped_step_is_named(empty: Kernel):
    kernel = empty
    kernel.run(f"%%ddp{MODEL}")
    apart = kernel.run("found = %ddp_check\nfound")
    assert "differ: parameters of model." in apart.text
    assert "each rank has drawn its own initial weights" in apart.text
    kernel.run(f"%%ddp\nddp = DDP(model)\noptimizer = torch.optim.Adam(ddp.parameters()){STEP}")
    kernel.run("%%ddp\noptimizer.step()")
    cell = kernel.run("%ddp_check ddp optimizer")
    assert "The replicas are the same on ranks 0-1; buffers of ddp differ by design." in cell.text
    assert cell.text.count("✓ same") == 4
    inner = kernel.run("%ddp_check model")  # DDP holds it, by another name
    assert "buffers of model differ by design" in inner.text
    assert "random state" in cell.text
    assert "· different" in cell.text
    (html,) = cell.bundles("text/html")
    assert "<table" in html
    assert "parameters of ddp" in html
    kernel.run("%%ddp\nbefore = torch.get_rng_state()\nif rank == 1:\n    optimizer.step()")
    text = kernel.run("found = %ddp_check ddp optimizer\nfound").text
    assert "A rank skipped a step: optimizer has counted 1 on rank 0 and 2 on rank 1." in text
    assert "step of 0.weight: rank 0 against rank 1, 1 of 1 element: 1 at most" in text
    assert kernel.value("found.is_same") == "False"
    same = "torch.equal(before, torch.get_rng_state()), torch.is_grad_enabled()"
    assert kernel.run(f"%%ddp\nprint({same})").by_rank == both("True True")
    kernel.run(f"%%ddp\nwith ddp.no_sync():\n    {STEP.strip().splitlines()[1]}")
    assert "✗ different" in kernel.run("import ddpnb\nprint(ddpnb.check('ddp'))").text


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
    text = kernel.run("%ddp_check sharded optimizer").text
    assert "parameters of sharded  – not compared" in text
    assert "2 tensors sharded, or without values: not comparable" in text
    assert "state of optimizer     – not compared" in text
    assert "✗" not in text


def test_what_cannot_be_compared_is_one_sentence(empty: Kernel):
    kernel = empty
    kernel.run("%%ddp\nvalue = 1")
    kernel.run("%%rank 1\nimport torch\nonly = torch.ones(2)")
    for line, sentence in (
        ("", "No rank has a model or an optimizer"),
        ("valu", "No rank has valu; did you mean value?"),
        ("only", "Only rank 1 has only: make it on rank 0 too."),
        ("value", "value on rank 0 is an int: name a model, an optimizer"),
        ("value[0]", "value[0] on rank 0 raises TypeError"),
        ("--all", "ddp_check has no option --all"),
    ):
        cell = kernel.run(f"%ddp_check {line}")
        assert cell.error == "UserError"
        assert sentence in cell.error_text
    kernel.run("%%ddp --no-wait\nimport time\nwhile True:\n    time.sleep(0.05)")
    for line in ("%ddp_check value", "%ddp_samples"):
        assert "A cell is still running on rank 0-1" in kernel.run(line).error_text
    kernel.run("%ddp_interrupt")


def test_samples_are_handed_out_by_torchs_sampler_on_the_ranks(empty: Kernel):
    kernel = empty
    cell = kernel.run("%ddp_samples -n 5 --epochs 2")
    assert "rank 0: 0 2 4" in cell.text
    assert "rank 1: 1 3 0" in cell.text
    assert "epoch 1: the same" in cell.text
    (output,) = (each for each in cell.outputs if "data" in each)
    assert {"image/png", "text/html", "text/plain"} <= set(output["data"])
    left = kernel.run("%ddp_samples -n 5 --epochs 1 --drop-last --shuffle")
    assert "left out: " in left.text
    kernel.run(
        """%%ddp
from torch.utils.data import DataLoader, IterableDataset
import torch
loader = DataLoader(list(range(6)), batch_size=2, shuffle=True)
class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))
stream = DataLoader(Stream())
"""
    )
    kernel.run("%%ddp\nbefore = torch.get_rng_state()")
    text = kernel.run("%ddp_samples loader --epochs 1").text
    assert "Every rank gets the same samples, 2 times the same work" in text
    kept = kernel.run("%%ddp\nprint(torch.equal(before, torch.get_rng_state()))")
    assert kept.by_rank == both("True")
    for line, sentence in (
        ("stream", "its IterableDataset chooses the samples by its own code"),
        ("lader", "has no lader, and no stored run has that name; did you mean loader?"),
        ("torch", "holds a module as torch: name a sampler or a DataLoader"),
        ("-n 0", "-n takes a whole number from 1"),
        ("--epochs 99", "--epochs takes a whole number from 1 to 20"),
    ):
        assert sentence in kernel.run(f"%ddp_samples {line}").error_text
    assert "--drop-last" in kernel.complete("%ddp_samples --d")
    assert "loader" in kernel.complete("%ddp_samples loa")
    assert "loader" in kernel.complete("%ddp_check stream.dataset loa")


def test_shards_of_a_stored_run_are_shown_by_worker(kernel: Kernel):
    trained = kernel.run(
        """%%ddp_compare async ddp --no-baseline --name shards --batch-size 200 --epochs 2
import torch
def model(): return torch.nn.Linear(8, 2)
def data(split): return torch.randn(1000, 8), torch.randint(2, (1000,))
""",
        timeout=120,
    )
    assert not trained.error, trained.error_text
    handout = kernel.run("import ddpnb\nfound = ddpnb.samples('shards/async')\nprint(found)").text
    assert "shards/async: shards, in the order in which they were handed out" in handout
    owned = "sorted(int(n) for row in found.rows for each in row.handed_out for n in each)"
    assert kernel.value(f"{owned} == list(range(20))") == "True"
    assert "shards/async" in kernel.complete("%ddp_samples sha")
    assert "was trained synchronously" in kernel.run("%ddp_samples shards/ddp").error_text
