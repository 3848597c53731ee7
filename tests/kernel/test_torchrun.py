"""Code for torchrun works in cells, with process groups, child processes and torch.compile."""

import pytest

from tests.cluster.rig import FORKS
from tests.kernel.client import Kernel, both

pytestmark = pytest.mark.usefixtures("unharmed")

TUTORIAL = """%%ddp
import os, torch, torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group

os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
for form in (init_process_group, dist.init_process_group):
    form("cpu:gloo,cuda:nccl", rank=int(os.environ["RANK"]), world_size=world_size)
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    destroy_process_group(other)
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    print(total.item(), dist.is_initialized(), dist.get_backend())
    destroy_process_group()
    print(dist.is_initialized())
try:
    dist.all_reduce(total)
except ValueError as error:
    print("has not been initialized" in str(error))
try:
    dist.get_process_group_ranks(pair)
except KeyError:
    print("its groups have ended")
"""


def test_a_cell_forms_and_destroys_the_group_and_the_next_has_one(kernel: Kernel):
    cell = kernel.run(TUTORIAL).passed
    passes = ["2.0 True gloo", "False"]
    assert cell.by_rank == both(*passes, *passes, "True", "its groups have ended")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("'nccl'", "asks for backend nccl, but the cluster's group has backend gloo. Change"),
        ("world_size=4", "asks for world_size 4, but the cluster's group has world_size 2. Change"),
        ("rank=1 - rank", "asks for rank 1, but the cluster's group has rank 0. Change"),
    ],
)
def test_another_group_is_refused_in_one_sentence(kernel: Kernel, call: str, expected: str):
    source = f"import torch.distributed as dist\ndist.init_process_group({call})"
    cell = kernel.run(f"%%ddp\n{source}")
    assert expected in cell.error_text
    assert "distributed_c10d" not in cell.error_text
    assert f"Cell In[{cell.number}], line 3" in cell.error_text


@FORKS
def test_child_processes_of_a_cell_can_be_started(kernel: Kernel):
    cell = kernel.run(
        "%%ddp\nimport torch\nfrom pathlib import Path\n"
        "made = [Path(f'made-{rank}-{n}') for n in range(2)]\n"
        "def make(n): made[n].touch()\n"
        "torch.multiprocessing.start_processes(make, nprocs=2, start_method='fork')\n"
        "all(path.exists() for path in made)"
    )
    assert cell.by_rank == both("True")


COMPILED = """%%ddp
import torch, torch.distributed as dist, warnings
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

def summed(x):
    dist.all_reduce(x)
    return x * 2

def sent(x):
    dist.broadcast(x, 0)
    return x * 2

warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*pybind11_object")  # plain torch's own
whole = torch.compile(summed, backend="aot_eager", fullgraph=True)
print(whole(torch.ones(2) + rank).tolist(), len(counters["graph_break"]))
print(torch.compile(sent, backend="aot_eager")(torch.ones(2) + rank).tolist())
print(sum(counters["graph_break"].values()))  # as plain torch has it
counters.clear()
net = DDP(torch.compile(nn.Linear(2, 1), backend="aot_eager", fullgraph=True))
for _ in range(2):
    net(torch.ones(1, 2)).sum().backward()
print(len(counters["graph_break"]))
warnings.resetwarnings()
"""


def test_torch_compile_breaks_no_graph_and_warns_of_nothing_here(kernel: Kernel):
    cell = kernel.run(COMPILED, timeout=120).passed
    assert cell.by_rank == both("[6.0, 6.0] 0", "[2.0, 2.0]", "1", "0")
    assert not cell.stderr
