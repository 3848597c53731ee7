"""Code in the style of PyTorch's tutorials and examples runs unchanged on the ranks."""

from tests.compat.conftest import Run
from tests.kernel.client import both

SHARDED = """%%ddp
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(self.up(x).relu())

def made():
    torch.manual_seed(1)
    return FeedForward()

mesh = init_device_mesh("cpu", (world_size,))
alone, sharded = made(), fully_shard(made(), mesh=mesh)
split = parallelize_module(made(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
for each in (alone, sharded, split):
    optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
    for _ in range(3):
        each(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
print(*(torch.allclose(alone(x), each(x), atol=1e-6) for each in (sharded, split)))
print(len(whole), tuple(split.up.weight.to_local().shape))
"""


def test_fsdp2_and_tensor_parallel_compute_what_one_process_does(run: Run):
    assert run(SHARDED).by_rank == both("True True", "4 (6, 6)")


RPC = """%%ddp
import socket, threading
import torch, torch.distributed as dist
import torch.distributed.rpc as rpc

lock, weights, num_updates = threading.Lock(), torch.zeros(3, 1), 0

def pull():
    with lock:
        return weights.clone()

def push(gradient):
    global num_updates
    with lock:
        weights.sub_(0.1 * gradient)
        num_updates += 1
        return num_updates

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = [free.getsockname()[1]]
dist.broadcast_object_list(port, src=0)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size,
             rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                 init_method=f"tcp://127.0.0.1:{port[0]}", rpc_timeout=20))
if rank > 0:
    truth = torch.tensor([[1.0], [2.0], [3.0]])
    for _ in range(60):
        x = torch.randn(16, 3)
        pulled = rpc.rpc_sync("worker0", pull).requires_grad_()
        (x @ pulled - x @ truth).square().mean().backward()
        count = rpc.rpc_sync("worker0", push, (pulled.grad,))
    print(count, torch.allclose(rpc.rpc_sync("worker0", pull), truth, atol=0.1))
rpc.shutdown()
"""


def test_a_parameter_server_over_rpc_trains_and_leaves_the_ranks_usable(run: Run):
    """RPC starts twice. In torch 2.13 no process keeps remote references after a shutdown."""
    for _ in range(2):
        assert run(RPC).by_rank[1] == ["60 True"]
        cell = run("%%ddp\ntotal = torch.ones(1)\ndist.all_reduce(total)\ntotal.item()")
        assert cell.by_rank == both("2.0")
